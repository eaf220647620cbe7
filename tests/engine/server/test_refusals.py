"""Bad input to the engine server is refused with OpenAI's errors, and the server survives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator

import httpx
import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.types import (
    Branch,
    EngineBusy,
    InvalidRequest,
    TokenizeRequest,
)
from engine.remote.http import HttpEngine
from engine.server.body_limit import MAX_BODY_BYTES
from tests.engine.helpers import generate
from tests.engine.server.calls import PROMPT, collect, sampled

BAD_COMPLETIONS: list[tuple[dict[str, object], int, str | None]] = [
    ({"model": "nobody"}, 404, "model"),
    ({"model": "prm"}, 404, "model"),
    ({"unheard_of": 1}, 400, "unheard_of"),
    ({"best_of": 3}, 400, "best_of"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ["add", ""]}, 400, "prompt"),
    ({"prompt": [[5], []]}, 400, "prompt"),
    ({"prompt": [[5], [4000]]}, 400, "prompt"),
    ({"prompt": ["add"] * 100, "n": 11}, 400, None),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"logit_bias": {"400": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"add": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"min_tokens": 17}, 400, None),
    ({"min_tokens": -1}, 400, "min_tokens"),
    ({"stop": "x" * 300}, 400, "stop"),
    ({"n": 1025}, 400, "n"),
    ({"n": 0}, 400, "n"),
    ({"n": "3"}, 400, "n"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 10**9}, 400, "max_tokens"),
    ({"branches": [{"seed": 1, "key": 1, "max_tokens": 10**30}]}, 400, "branches"),
    ({"prompt": "a\ud800"}, 400, "prompt"),
    ({"prompt": ["a", "\udfff"]}, 400, "prompt"),
    ({"stop": "\ud800"}, 400, "stop"),
    ({"temperature": math.inf}, 400, "temperature"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [4000]}, 400, "prompt"),
    ({"prompt": [5] * 300}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"temperature": -1}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"min_p": 2}, 400, "min_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop_token_ids": [4000]}, 400, "stop_token_ids"),
    ({"timeout": 0}, 400, "timeout"),
    ({"seed": 1 << 64}, 400, "seed"),
    ({"branches": []}, 400, "branches"),
    ({"branches": [{"seed": 1, "key": 1, "max_tokens": 1}], "n": 2}, 400, None),
    ({"branches": [{"seed": 1, "key": 1, "max_tokens": 1, "generated": [4000]}]}, 400, "branches.generated"),
]


@pytest.mark.parametrize(("change", "status", "param"), BAD_COMPLETIONS)
async def test_a_bad_completion_request_is_refused_in_openais_shape(
    http: httpx.AsyncClient, change: dict[str, object], status: int, param: str | None
) -> None:
    for stream in ({}, {"stream": True}, {"stream_choices": True}):
        # httpx refuses to encode some of these values.
        body = json.dumps({"model": "m", "prompt": "add"} | change | stream)
        response = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        assert response.status_code == status, error
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        if param is not None:
            assert error["param"].startswith(param)


async def test_an_overlong_text_is_refused_before_tokenization(
    http: httpx.AsyncClient, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("m", "prm"):
        monkeypatch.setattr(engine.tokenizer(name), "encode", None)  # calling it would raise
    text = "add " * 1_000_000
    for path, body in (
        ("/v1/completions", {"model": "m", "prompt": text}),
        ("/v1/score", {"model": "prm", "items": [{"parts": [text], "read": [0]}]}),
    ):
        response = await http.post(path, json=body)
        assert response.status_code == 400
        assert "4000000 characters" in response.json()["error"]["message"]


async def test_validation_messages_are_plain_sentences(http: httpx.AsyncClient) -> None:
    for change, message in (
        ({"temprature": 1}, "temprature: unknown field"),
        ({"min_tokens": 17}, "body: min_tokens is 17, more than max_tokens, 16"),
        ({"max_tokens": 10**9}, "max_tokens is 1000000000; the context has 256 tokens"),
    ):
        response = await http.post("/v1/completions", json={"model": "m", "prompt": "add"} | change)
        assert response.json()["error"]["message"] == message


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score", "/v1/abort", "/tokenize"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"model": 3}', b"\xff\xfe"])
async def test_a_malformed_body_is_refused(http: httpx.AsyncClient, path: str, content: bytes) -> None:
    response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"model": "m", "items": [{"parts": ["a"], "read": [0]}]}),
        ("/v1/score", {"model": "m", "items": [{"parts": ["a"], "read": [1]}], "token_ids": [1]}),
        ("/v1/score", {"model": "m", "items": [{"parts": [], "read": [0]}], "token_ids": [1]}),
        ("/v1/score", {"model": "m", "items": [{"parts": ["a"], "read": []}], "token_ids": [1]}),
        ("/v1/score", {"model": "prm", "items": [{"parts": ["a"], "read": [0]}], "token_ids": [1]}),
        ("/v1/score", {"model": "m", "items": [{"parts": ["\ud800"], "read": [0]}], "token_ids": [1]}),
        ("/tokenize", {"model": "m"}),
        ("/tokenize", {"model": "m", "prompt": "\ud800"}),
        ("/tokenize", {"model": "m", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_bad_score_or_tokenize_request_is_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    response = await http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text


async def test_an_oversized_body_is_refused_with_and_without_a_content_length(http: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    announced = await http.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert announced.status_code == 413
    with contextlib.suppress(httpx.WriteError):  # the server may disconnect before everything is sent
        chunked = await http.post("/v1/completions", content=endless(), headers={"Content-Type": "application/json"})
        assert chunked.status_code == 413
        assert "error" in chunked.json()


async def test_unknown_routes_and_methods_return_errors(http: httpx.AsyncClient) -> None:
    assert (await http.get("/nowhere")).json()["error"]["code"] == "http_error"
    assert (await http.get("/v1/completions")).status_code == 405


async def test_refusals_become_the_exceptions_of_the_interface(client: HttpEngine) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await collect(client, generate(PROMPT, [Branch(1, 1, 1)], temperature=-1.0))
    assert refusal.value.field == "temperature"
    with pytest.raises(InvalidRequest, match="not served"):
        await client.tokenize(TokenizeRequest("nobody", "text"))
    with pytest.raises(EngineBusy):
        await asyncio.gather(*(collect(client, sampled(16, 100)) for _ in range(12)))
