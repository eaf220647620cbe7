"""A vLLM in front of our engine: one that computes its model, and one that writes something else after some tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.core.local_engine import LocalEngine
from engine.protocol.types import Branch, Completion, TokenizeRequest
from tests.engine.helpers import generate

NONSENSE = 0.5
"""Minus the log-probability that a server claims for its nonsense."""


@dataclass
class MockVllm:
    """The part of vLLM's API that greedy texts and log-probabilities of prompts need.

    ``honest``: the number of tokens after which it writes others than the model's, with log-probabilities as if they
    were likely; None for all. ``form``: with vLLM's ``prompt_logprobs``, with OpenAI's ``echo``, or without either.
    """

    engine: LocalEngine
    model: str
    honest: int | None = None
    form: Literal["vllm", "echo", "none"] = "vllm"
    version: str | None = "0.32.0"
    key: str | None = None
    entry: dict[str, Any] = field(default_factory=lambda: {"max_model_len": 256})
    splits_alike: bool = True
    """True to split a text that it has written into the tokens that it wrote, as trained models mostly do."""
    _written: dict[str, list[int]] = field(default_factory=dict)

    @property
    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        return Starlette(routes=[*routes, *([Route("/version", self._version)] if self.version else [])])

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": self.version})

    async def _models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "Unauthorized"}}, 401)
        owner = "vllm" if self.form == "vllm" else "somebody"
        entry = {"id": self.model, "object": "model", "created": 1, "owned_by": owner, "permission": []}
        return JSONResponse({"object": "list", "data": [entry | self.entry]})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        text = body.get("prompt", body.get("messages"))
        tokens = await self.engine.tokenize(
            TokenizeRequest(self.model, text, special=body.get("add_special_tokens", True))
        )
        return JSONResponse({"tokens": tokens})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        text = prompt if isinstance(prompt, str) else ""
        if text:
            prompt = self._written.get(text) or list(await self.engine.tokenize(TokenizeRequest(self.model, text)))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if "prompt_logprobs" in body:
            rows = [
                None,
                *(
                    {str(id): self._entry(id, value, top)} | likely
                    for id, value, top, likely in await self._read(prompt)
                ),
            ]
            return JSONResponse({"choices": [{"text": "x", "prompt_logprobs": rows}], "usage": usage})
        if body.get("echo") and self.form == "echo":
            read = await self._read(prompt)
            names = [self._name(token) for token in prompt]
            values = [None, *(value for _, value, _, _ in read)]
            logprobs = {"tokens": [*names, " x"], "token_logprobs": [*values, -1.0]}
            return JSONResponse({"choices": [{"text": "".join(names) + " x", "logprobs": logprobs}], "usage": usage})
        ids, written = await self._write(prompt, body["max_tokens"], ignore_eos=body.get("ignore_eos", False))
        names = [self._name(token) for token in ids]
        if self.splits_alike:
            self._written[text + "".join(names)] = [*prompt, *ids]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(names),
            "finish_reason": "length" if len(ids) == body["max_tokens"] else "stop",
        }
        if self.form == "vllm":
            tops = [{f"token_id:{id}": value} for id, value in zip(ids, written, strict=True)]
            choice |= {"token_ids": ids, "logprobs": {"token_logprobs": written, "top_logprobs": tops, "tokens": names}}
        elif self.form == "echo":
            choice["logprobs"] = {"tokens": names, "token_logprobs": written}
        if not body.get("stream"):
            return JSONResponse({"choices": [choice], "usage": usage})

        async def stream() -> AsyncIterator[str]:
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _name(self, token: int) -> str:
        return self.engine.tokenizer(self.model).decode_all([token])

    def _entry(self, token: int, value: float, top: int) -> dict[str, Any]:
        return {"logprob": value, "rank": 1 if token == top else 2, "decoded_token": self._name(token)}

    async def _read(self, prompt: list[int]) -> list[tuple[int, float, int, dict[str, Any]]]:
        request = generate(prompt, [Branch(0, 0, 0)], model=self.model, prompt_logprobs=1)
        [one] = [event async for event in self.engine.generate(request) if isinstance(event, Completion)]
        rows = []
        for read in one.prompt_logprobs or ():
            if read is not None:
                [(top, best)] = read.top
                rows.append((read.token_id, read.logprob, top, {str(top): self._entry(top, best, top)}))
        return rows

    async def _write(self, prompt: list[int], count: int, *, ignore_eos: bool) -> tuple[list[int], list[float]]:
        request = generate(
            prompt, [Branch(0, 0, count)], model=self.model, temperature=0.0, logprobs=1, ignore_eos=ignore_eos
        )
        [one] = [event async for event in self.engine.generate(request) if isinstance(event, Completion)]
        ids, values = list(one.token_ids), [each.logprob for each in one.logprobs or ()]
        if self.honest is not None:
            ids[self.honest :] = [7 + 11 * place % 60 for place in range(len(ids) - self.honest)]
            values[self.honest :] = [-NONSENSE] * (len(values) - self.honest)
        return ids, values
