"""Readiness reflects the engines' present state, not the last check."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.service.null_engine import POLICY, VERIFIER, NullEngine
from engine.protocol.types import InvalidRequest, ModelInfo, ProbeInfo, TokenizeRequest
from tests.api.conftest import serving
from tests.listening import listening
from tests.scripted import ScriptedEngine
from workers.config.model_profiles import ModelProfile
from workers.config.settings import Settings

pytestmark = pytest.mark.usefixtures("slow_to_look_again")


@pytest.fixture
def slow_to_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make cached health last for ever, so that only a new query sees a change."""
    monkeypatch.setattr("engine.remote.health.PROBE_INTERVAL_SECONDS", 3600.0)
    monkeypatch.setattr("api.http.model_catalog.CACHE_SECONDS", 3600.0)
    monkeypatch.setattr("engine.remote.replicas.REPORT_PROBE_INTERVAL_SECONDS", 0.0)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
async def client(settings: Settings, socket: Path) -> AsyncIterator[httpx.AsyncClient]:
    named = {"engine_url": (f"unix://{socket}",), "model": POLICY, "prm": VERIFIER}
    async with serving(settings.model_copy(update=named)) as client:
        yield client


async def engine_up(client: httpx.AsyncClient) -> float:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    [sample] = [part for family in families for part in family.samples if part.name == "reasoner_engine_up"]
    return float(sample.value)


async def test_readiness_follows_an_engine_that_stops_and_restarts_at_once(
    client: httpx.AsyncClient, socket: Path
) -> None:
    for _ in range(2):
        with listening(NullEngine(0.0).app, socket):
            assert (await client.get("/readyz")).status_code == 200
            assert await engine_up(client) == 1
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert "could not be reached" in answer.json()["errors"][0]["message"]
        with listening(NullEngine(0.0).app, socket):
            assert await engine_up(client) == 1
        assert await engine_up(client) == 0


async def test_an_engine_that_no_longer_answers_is_not_up(
    client: httpx.AsyncClient, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.remote.health.PROBE_OVERDUE_SECONDS", 0.05)
    monkeypatch.setattr("engine.remote.replicas.REPORT_GRACE_SECONDS", 0.1)
    hangs = Hanging(NullEngine(0.0))
    with listening(hangs.app, socket):
        assert (await client.get("/readyz")).status_code == 200
        hangs.may_answer.clear()
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert "has not answered" in answer.json()["errors"][0]["message"]
        assert await engine_up(client) == 0
        hangs.release()
        while (await client.get("/readyz")).status_code != 200:
            pass
        assert await engine_up(client) == 1


async def test_concurrent_readiness_checks_share_one_query(client: httpx.AsyncClient, socket: Path) -> None:
    hangs = Hanging(NullEngine(0.0))
    with listening(hangs.app, socket):
        assert (await client.get("/readyz")).status_code == 200  # the server behind the address is known from here on
        hangs.count = 0
        answers = await asyncio.gather(*(client.get(path) for path in ("/readyz", "/metrics") * 20))
    assert {answer.status_code for answer in answers} == {200}
    assert hangs.count < len(answers) / 2


class Hanging:
    """An engine that can be made to hang when its models are queried. ``count`` is the number of these queries."""

    def __init__(self, engine: NullEngine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.count = 0
        tokenize = Route("/tokenize", engine._tokenize, methods=["POST"])
        self.app = Starlette(routes=[Route("/v1/models", self._models), tokenize])

    def release(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.may_answer.set)

    async def _models(self, request: Request) -> Response:
        self._loop = asyncio.get_running_loop()
        self.count += 1
        await self.may_answer.wait()
        answer = await self._engine._models(request)
        assert isinstance(answer, JSONResponse)
        return answer


class Engine(ScriptedEngine):
    """An engine with these models. Its tokenizer cuts the separator into ``pieces``; it may have no chat template."""

    def __init__(self, *served: ModelInfo, pieces: int = 1, template: bool = True) -> None:
        super().__init__()
        self._served = served
        self._pieces = pieces
        self._template = template
        self.tokenized = 0

    async def models(self) -> list[ModelInfo]:
        return list(self._served)

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        self.tokenized += 1
        if not isinstance(request.text, str) and not self._template:
            raise InvalidRequest("the model has no chat template; give a plain text instead of messages", "messages")
        if request.text == "\n\n":
            return (7,) * self._pieces
        return await super().tokenize(request)


NOTES = {"reasoner_prm": {"format": "token_classification", "separator": "\n\n", "positive_label": 1}}
MODEL = ModelInfo("policy", "generate", 256, 100, 1000)
PRM = ModelInfo("prm", "classify", 256, 100, 1000, NOTES)


@pytest.mark.parametrize(
    ("engine", "prm", "messages"),
    [
        (Engine(MODEL, PRM), None, []),
        (Engine(MODEL), "none", []),
        (Engine(MODEL), None, ["REASONER_PRM 'prm' is not served; served are policy; .*REASONER_PRM=none"]),
        (Engine(PRM), None, ["REASONER_MODEL 'policy' is not served; served are prm"]),
        (Engine(MODEL, replace(PRM, extra={})), None, ["'prm' is not known to be a process reward model.*_FORMAT"]),
        (Engine(MODEL, PRM, pieces=2), None, [r"separator '\\n\\n' is not a token .* cuts it into 2"]),
        (Engine(MODEL, template=False), "none", ["REASONER_MODEL 'policy': the model has no chat template"]),
    ],
)
async def test_the_service_is_ready_only_if_the_engines_serve_the_default_models(
    settings: Settings, engine: Engine, prm: str | None, messages: list[str]
) -> None:
    async with serving(settings.model_copy(update={"prm": prm}), engine) as client:
        answer = await client.get("/readyz")
        assert answer.status_code == (503 if messages else 200)
        errors = answer.json().get("errors", [])
        assert [error["field"] for error in errors] == ["models"] * len(messages)
        for error, message in zip(errors, messages, strict=True):
            assert re.search(message, error["message"])


async def test_a_probe_by_default_that_the_engine_does_not_have_is_named(settings: Settings) -> None:
    tables = {name: ModelProfile.model_validate({"verifier": {"kind": "probe"}}) for name in ("policy", "absent")}
    settings = settings.model_copy(update={"models": tables})
    probed = replace(MODEL, probe=ProbeInfo("1f", (2,), 65))
    for served, status in ((MODEL, 503), (probed, 200)):
        async with serving(settings, Engine(served)) as client:
            answer = await client.get("/readyz")
            assert answer.status_code == status
            for error in answer.json().get("errors", []):
                assert "models.policy.verifier is a probe, but 'policy' has none: fit one" in error["message"]


async def test_a_model_that_has_passed_is_not_checked_again(settings: Settings) -> None:
    engine = Engine(MODEL, PRM)
    async with serving(settings, engine) as client:
        await client.get("/readyz")
        asked = engine.tokenized
        assert (await client.get("/readyz")).status_code == 200
        assert engine.tokenized == asked
        engine._served = (MODEL, replace(PRM, fingerprint="another"))
        await client.get("/readyz")
        assert engine.tokenized > asked


async def test_problems_of_the_models_are_logged_once(settings: Settings) -> None:
    async with serving(settings, Engine(MODEL)) as client:
        structlog.reset_defaults()
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await client.get("/readyz")
    assert len([entry for entry in logs if "'prm' is not served" in str(entry.get("problems"))]) == 1
