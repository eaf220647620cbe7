"""Constraints on their way to servers: ours, vLLM, SGLang and those that only chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest

from engine.protocol.types import TokenizeRequest

pytest.importorskip("llguidance", reason="the package llguidance is not installed")

from engine.core.local_engine import LocalEngine
from engine.protocol.constraint import Constraint
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineClient, EngineError, GenerateRequest, NotSupported
from engine.remote.http import HttpEngine
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import generate
from tests.engine.remote.test_chat import Hosted, said, stream, usage
from tests.engine.remote.test_openai_compatible import POLICY, chunks, piece, scripted
from tests.engine.serving import served

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
JSON, REGEX = Constraint("json", json.dumps(SCHEMA)), Constraint("regex", "a+b")
CHOICE, GRAMMAR = Constraint("choice", '["x.y", "z"]'), Constraint("grammar", 'start: "a"')
PROMPT = (17, 5, 90)


def constrained(constraint: Constraint, *branches: Branch, **sampling: Any) -> GenerateRequest:
    return replace(generate(PROMPT, branches or [Branch(1, 1, 60)], **sampling), constraint=constraint)


async def collect(engine: EngineClient, request: GenerateRequest) -> list[Completion]:
    events = [event async for event in engine.generate(request)]
    return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Iterator[LocalEngine]:
    local = LocalEngine({"m": checkpoints("qwen3")}, EngineOptions(kv_tokens=4096))
    yield local
    asyncio.run(local.close())


@pytest.fixture(scope="module")
def address(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(engine, tmp_path_factory.mktemp("socket") / "engine.sock") as url:
        yield url


async def test_our_server_gives_what_the_engine_gives_in_process(engine: LocalEngine, address: str) -> None:
    client = HttpEngine(address)
    lifting = replace(constrained(CHOICE, temperature=2.0, logit_bias=((1, 30.0),)), constraint_escape_tokens=(1,))
    late = constrained(CHOICE, Branch(1, 1, 60, generated=(9, 9), constraint_start=len(PROMPT) + 2))
    for request in (constrained(JSON), constrained(REGEX), constrained(CHOICE), constrained(GRAMMAR), lifting, late):
        assert [_text(one) for one in await collect(client, request)] == [
            _text(one) for one in await collect(engine, request)
        ]
    await client.close()


def _text(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop


async def test_completions_take_vllms_structured_outputs(address: str) -> None:
    transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:

        async def complete(outputs: dict[str, Any]) -> httpx.Response:
            body = {"model": "m", "prompt": list(PROMPT), "max_tokens": 200, "seed": 1, "structured_outputs": outputs}
            return await http.post("/v1/completions", json=body)

        text = (await complete({"json": SCHEMA})).json()["choices"][0]["text"]
        jsonschema.validate(json.loads(text), SCHEMA)
        assert (await complete({"choice": ["yes", "no"]})).json()["choices"][0]["text"] in ("yes", "no")
        assert (await complete({"regex": "x{3}"})).json()["choices"][0]["text"] == "xxx"
        assert (await complete({"grammar": 'start: "q" "r"'})).json()["choices"][0]["text"] == "qr"
        for wrong in ({}, {"regex": "a", "json": {}}, {"regex": "("}, {"unknown": 1}, {"json_object": False}):
            refused = await complete(wrong)
            assert refused.status_code in (400, 422), wrong


@pytest.mark.parametrize(
    ("dialect", "constraint", "fields"),
    [
        ("vllm", JSON, {"structured_outputs": {"json": SCHEMA}}),
        ("vllm", REGEX, {"structured_outputs": {"regex": "a+b"}}),
        ("vllm", CHOICE, {"structured_outputs": {"choice": ["x.y", "z"]}}),
        ("vllm", GRAMMAR, {"structured_outputs": {"grammar": 'start: "a"'}}),
        ("sglang", JSON, {"json_schema": json.dumps(SCHEMA)}),
        ("sglang", REGEX, {"regex": "a+b"}),
        ("sglang", CHOICE, {"regex": r"x\.y|z"}),
        ("sglang", GRAMMAR, {"ebnf": 'start: "a"'}),
    ],
)
async def test_other_servers_get_their_own_fields(dialect: str, constraint: Constraint, fields: dict[str, Any]) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return chunks(piece("z", [5], -1.0, finish_reason="stop"))

    client = scripted(dialect, answer)
    await collect(client, constrained(constraint))
    assert fields.items() <= bodies[0].items()
    continued = constrained(constraint, Branch(1, 1, 9, generated=(5,), constraint_start=len(PROMPT)))
    with pytest.raises(EngineError, match="begin a constraint elsewhere"):
        await collect(client, continued)
    after_thought = constrained(constraint, Branch(1, 1, 9, generated=(5,), constraint_start=len(PROMPT) + 1))
    await collect(client, after_thought)
    await client.close()


async def test_a_server_without_constraints_refuses_by_name() -> None:
    client = scripted("openai", lambda _: chunks(), tokenizer=POLICY)
    with pytest.raises(NotSupported, match="hold a text to a constraint"):
        await collect(client, constrained(JSON))
    await client.close()


async def test_a_chat_server_gets_a_response_format_and_no_other_language() -> None:
    hosted = Hosted(lambda _: stream(said('{"a": 1}', "stop"), usage(9, 3)))
    prompt = await hosted.engine.tokenize(TokenizeRequest("m", [{"role": "user", "content": "?"}]))
    request = GenerateRequest("r", "m", prompt, (Branch(1, 1, 9),), constraint=JSON)
    [one] = await collect(hosted.engine, request)
    assert one.text == '{"a": 1}'
    schema = {"name": "answer", "schema": SCHEMA, "strict": True}
    assert hosted.bodies[0]["response_format"] == {"type": "json_schema", "json_schema": schema}
    with pytest.raises(NotSupported, match="hold an answer to a regex"):
        await collect(hosted.engine, replace(request, constraint=REGEX))
    await hosted.engine.close()
