"""Frequency and presence penalty on their way to servers, which count the tokens of one request alone unless ours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, EngineClient, GenerateRequest, NotSupported, TokenizeRequest
from engine.remote.chat.options import ChatOptions
from engine.remote.http import HttpEngine
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import generate
from tests.engine.remote.test_chat import Hosted, said, stream, usage
from tests.engine.remote.test_constraints import collect
from tests.engine.remote.test_openai_compatible import POLICY, chunks, piece, scripted
from tests.engine.serving import served

PENALTIES: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": -0.5}
PROMPT = (17, 5, 90)


def test_our_server_gives_what_the_engine_gives_in_process(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = LocalEngine({"m": checkpoints("qwen3")}, EngineOptions(kv_tokens=4096))
    request = generate(PROMPT, [Branch(1, 1, 30), Branch(1, 2, 30, generated=(9, 9))], **PENALTIES, penalty_start=1)

    async def compare(client: EngineClient) -> None:
        own, theirs = await collect(engine, request), await collect(client, request)
        assert [one.token_ids for one in own] == [one.token_ids for one in theirs]
        await client.close()

    with served(engine, tmp_path_factory.mktemp("socket") / "engine.sock") as url:
        asyncio.run(compare(HttpEngine(url)))
    asyncio.run(engine.close())


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_other_servers_get_the_fields_and_no_beginning_of_an_answer(dialect: str) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return chunks(piece("z", [5], -1.0, finish_reason="stop"))

    client = scripted(dialect, answer)
    await collect(client, generate(PROMPT, [Branch(1, 1, 9)], **PENALTIES))
    assert bodies[0].items() >= PENALTIES.items()
    with pytest.raises(NotSupported, match="count tokens of an earlier request"):
        await collect(client, generate(PROMPT, [Branch(1, 1, 9, generated=(5,))], **PENALTIES))
    with pytest.raises(NotSupported, match="honour penalty_start"):
        await collect(client, generate(PROMPT, [Branch(1, 1, 9)], **PENALTIES, penalty_start=1))
    await client.close()


async def test_a_branch_whose_stream_broke_off_begins_again() -> None:
    """The server would not count what had arrived, so that the rest would have another distribution."""
    prompts: list[list[int]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        prompts.append(json.loads(request.content)["prompt"])
        if len(prompts) == 1:
            return httpx.Response(200, content=f"data: {json.dumps(piece('a', [7], -0.5))}\n\n".encode())
        return chunks(piece("a", [7], -0.5), piece("b", [8], -0.5, finish_reason="length"))

    client = scripted("vllm", answer)
    [one] = await collect(client, generate(PROMPT, [Branch(1, 1, 2)], **PENALTIES))
    assert prompts == [list(PROMPT), list(PROMPT)]
    assert (one.token_ids, one.text) == ((7, 8), "ab")
    await client.close()


async def test_llama_cpp_counts_prompts_and_is_refused_by_name() -> None:
    client = scripted("llamacpp", lambda _: chunks(), tokenizer=POLICY)
    with pytest.raises(NotSupported, match=r"honour (presence|frequency)_penalty"):
        await collect(client, generate(PROMPT, [Branch(1, 1, 9)], **PENALTIES))
    await client.close()


async def test_a_chat_server_gets_the_fields_unless_it_refuses_them() -> None:
    hosted = Hosted(lambda _: stream(said("4", "stop"), usage(9, 3)))
    prompt = await hosted.engine.tokenize(TokenizeRequest("m", [{"role": "user", "content": "?"}]))
    request = generate(prompt, [Branch(1, 1, 9)], **PENALTIES)
    await collect(hosted.engine, GenerateRequest("r", "m", prompt, request.branches, request.sampling))
    assert hosted.bodies[0].items() >= PENALTIES.items()
    assert "penalties" in ChatOptions().capabilities
    assert "penalties" not in ChatOptions(omit=frozenset({"presence_penalty"})).capabilities
