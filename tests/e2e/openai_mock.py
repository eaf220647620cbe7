"""OpenAI's chat API as its documentation describes it: keys, rate limits, streams, usage with hidden reasoning."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "gpt-5-mini"
KEY = "sk-a-secret-of-the-tests"
ANSWERS = ("The sum is \\boxed{4}", "It must be \\boxed{4}", "I think \\boxed{5}")
REASONING_TOKENS = 40
ANSWER_TOKENS = 9
CACHED_TOKENS = 6


@dataclass
class HostedChat:
    """The server, with what it was asked and what it billed."""

    refusals: int = 2
    """The first requests that it answers with 429."""
    cuts: int = 1
    """The streams that it then breaks off."""
    is_model_gone: bool = False
    thought: str = ""
    """Text that it sends as ``reasoning_content``; without it reasoning is hidden."""
    billed: int = 0
    refused: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return _error(401, "Incorrect API key provided.", "invalid_api_key")
        names = ["gpt-4o", *([] if self.is_model_gone else [MODEL])]
        return JSONResponse({"object": "list", "data": [{"id": name, "owned_by": "openai"} for name in names]})

    async def _complete(self, request: Request) -> Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return _error(401, "Incorrect API key provided.", "invalid_api_key")
        body = await request.json()
        with self._lock:
            self.requests.append(body)
            index = len(self.requests) - 1
        if self.is_model_gone or body["model"] != MODEL:
            return _error(404, f"The model `{body['model']}` does not exist", "model_not_found", "model")
        if "max_tokens" in body:
            return _error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", "x")
        if index < self.refusals:
            self.refused += 1
            answer = _error(429, "Rate limit reached for requests", "rate_limit_exceeded")
            answer.headers["Retry-After"] = "1"
            return answer
        is_cut = index < self.refusals + self.cuts
        return StreamingResponse(self._stream(ANSWERS[index % len(ANSWERS)], is_cut), media_type="text/event-stream")

    async def _stream(self, text: str, is_cut: bool) -> AsyncIterator[str]:
        common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL}

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps(common | {'choices': choices, 'usage': None} | more)}\n\n"

        yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        if self.thought:
            yield event([{"index": 0, "delta": {"reasoning_content": self.thought}, "finish_reason": None}])
        for word in text.split(" "):
            yield event([{"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}])
            if is_cut:
                return
        yield event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        self.billed += REASONING_TOKENS + ANSWER_TOKENS
        usage = {
            "prompt_tokens": 20,
            "completion_tokens": REASONING_TOKENS + ANSWER_TOKENS,
            "total_tokens": 20 + REASONING_TOKENS + ANSWER_TOKENS,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
            "completion_tokens_details": {"reasoning_tokens": REASONING_TOKENS},
        }
        yield event([], usage=usage)
        yield "data: [DONE]\n\n"


def _error(status: int, message: str, code: str, param: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": error}, status)
