"""Log-probabilities of a given text: from our engine with the texts of tokens, and from a vLLM."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, EngineClient, NotSupported, TokenLogprob
from engine.remote.http import HttpEngine
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import generate
from tests.engine.remote.test_constraints import collect
from tests.engine.remote.test_openai_compatible import scripted
from tests.engine.serving import served

PROMPT = (17, 5, 90)
REQUEST = generate(PROMPT, [Branch(1, 1, 0)], prompt_logprobs=2)


def test_our_server_tells_the_texts_of_all_tokens_that_it_names(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = LocalEngine({"m": checkpoints("qwen3")}, EngineOptions(kv_tokens=4096))

    async def compare(client: EngineClient) -> None:
        [own], [theirs] = await collect(engine, REQUEST), await collect(client, REQUEST)
        assert own == theirs
        scored = [token for token in own.prompt_logprobs or () if token is not None]
        assert [token.token_id for token in scored] == list(PROMPT[1:])
        assert set(own.token_texts) == set(PROMPT[1:]) | {id for token in scored for id, _ in token.top}
        tokenizer = engine.tokenizer("m")
        for id, text in own.token_texts.items():
            assert text == (f"token_id:{id}" if "\ufffd" in tokenizer.decode_all([id]) else tokenizer.decode_all([id]))
        await client.close()

    with served(engine, tmp_path_factory.mktemp("socket") / "engine.sock") as url:
        asyncio.run(compare(HttpEngine(url)))
    asyncio.run(engine.close())


async def test_vllm_is_asked_in_its_own_way_and_billed_for_the_token_that_it_samples() -> None:
    bodies: list[dict[str, Any]] = []
    likely = {"7": {"logprob": -0.25, "rank": 1, "decoded_token": " a"}}
    rows = [
        None,
        {"5": {"logprob": -2.0, "rank": 9, "decoded_token": "b"}, **likely},
        {"90": {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"}},
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        return httpx.Response(200, json={"choices": [{"text": "x", "prompt_logprobs": rows}], "usage": usage})

    client = scripted("vllm", answer)
    [one] = await collect(client, generate(PROMPT, [Branch(1, 1, 0)], prompt_logprobs=1))
    body = bodies[0]
    assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == (list(PROMPT), 1, 1)
    assert one.prompt_logprobs == (
        None,
        TokenLogprob(5, -2.0, ((7, -0.25),)),
        TokenLogprob(90, -0.5, ((90, -0.5),)),
    )
    assert one.token_texts == {5: "b", 7: " a", 90: "token_id:90"}
    assert (one.token_ids, one.prompt_tokens, one.cached_tokens) == ((), 4, 0)
    with pytest.raises(NotSupported, match="score a prompt and generate at once"):
        await collect(client, generate(PROMPT, [Branch(1, 1, 3)], prompt_logprobs=1))
    await client.close()


async def test_other_servers_are_refused_by_name() -> None:
    client = scripted("sglang", lambda _: httpx.Response(500))
    with pytest.raises(NotSupported, match="honour prompt_logprobs"):
        await collect(client, REQUEST)
    await client.close()
