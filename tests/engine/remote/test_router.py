"""Routing of requests by model."""

from __future__ import annotations

import pytest

from engine.protocol.types import (
    Branch,
    EngineError,
    GenerateRequest,
    ModelInfo,
    ScoreItem,
    ScoreRequest,
    TokenizeRequest,
)
from engine.remote.router import KnownProperties, RoutedEngine
from tests.scripted import ScriptedEngine


class Named(ScriptedEngine):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.calls: list[str] = []

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo(name, "generate", 256, 100, 1000) for name in self.names]

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        self.calls.append(
            f"tokenize {request.model} {request.special} {request.generation_prompt} {request.template_kwargs}"
        )
        return (1,)

    async def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")

    async def clear_cache(self) -> None:
        self.calls.append("clear")

    async def close(self) -> None:
        self.calls.append("close")


async def test_each_model_is_requested_from_the_engine_that_serves_it() -> None:
    main, other = Named("policy", "prm"), Named("prm", "unused")
    engine = RoutedEngine(main, {"prm": other})
    assert [info.id for info in await engine.models()] == ["policy", "prm"]
    assert await engine.tokenize(TokenizeRequest("prm", "x", special=False)) == (1,)
    await engine.tokenize(
        TokenizeRequest("policy", "x", generation_prompt=False, template_kwargs={"enable_thinking": False})
    )
    await engine.score(ScoreRequest("s", "prm", (ScoreItem(((1,),), (0,)),), pin_key="job"))
    request = GenerateRequest("g", "policy", (1,), (Branch(0, 0, 3),), pin_key="job")
    assert len([item async for item in engine.generate(request)]) == 1
    assert (len(main.requests), len(other.requests)) == (1, 0)
    assert main.pin_keys == other.pin_keys == {"job"}
    await engine.release("job")
    await engine.abort("g")
    await engine.clear_cache()
    await engine.close()
    assert main.pin_keys == other.pin_keys == set()
    assert main.calls == ["tokenize policy True False {'enable_thinking': False}", "abort g", "clear", "close"]
    assert other.calls == ["tokenize prm False True {}", "abort g", "clear", "close"]


async def test_configured_properties_replace_those_of_the_model() -> None:
    known = {"prm": KnownProperties({"reasoner_prm": "rlhflow"}, parameters=7)}
    plain, changed = await RoutedEngine(Named("policy", "prm"), {}, known).models()
    assert (plain.extra, changed.extra) == ({}, {"reasoner_prm": "rlhflow"})
    assert changed.parameters == 7 != plain.parameters


async def test_an_engine_that_does_not_serve_its_model_raises_an_error_listing_its_models() -> None:
    engine = RoutedEngine(Named("policy"), {"prm": Named("a", "b")})
    with pytest.raises(EngineError, match="configured for model 'prm' does not serve it, but a, b"):
        await engine.models()
