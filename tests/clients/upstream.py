"""A chat server behind the service: a model whose answers are known, as OpenAI's documentation describes its API."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "bot"
CAPITAL = "The capital of France is Paris."
PERSON = {"name": "Ada", "age": 36}
ARGUMENTS = {"city": "Paris"}
CUT = "cut"
"""A question with this word gets an answer that ends in the middle."""
ENDLESS, ENDLESS_WORDS = "endless", 1200
"""A question with this word gets an answer that takes a minute, unless its client goes away."""


@dataclass
class Upstream:
    """The server, with the requests that it got."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._list_models),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "max_model_len": 32_768}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        with self._lock:
            self.requests.append(body)
        return StreamingResponse(_stream(body), media_type="text/event-stream")


async def _stream(body: dict[str, Any]) -> AsyncIterator[str]:
    common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL}

    def send(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps(common | {'choices': choices} | more)}\n\n"

    if ENDLESS in str(body["messages"][-1]["content"]):
        for _ in range(ENDLESS_WORDS):
            yield send([{"index": 0, "delta": {"content": "and "}, "finish_reason": None}])
            await asyncio.sleep(0.05)
    delta = _answer(body)
    yield send([{"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None}])
    is_cut = CUT in str(body["messages"][-1]["content"])
    reason = "tool_calls" if "tool_calls" in delta else "stop"
    yield send([{"index": 0, "delta": {}, "finish_reason": "length" if is_cut else reason}])
    usage = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
    yield send([], usage=usage)
    yield "data: [DONE]\n\n"


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    """Return a call of the function that is demanded or fits the question, JSON of the demanded schema, or words."""
    messages, functions = body["messages"], [tool["function"] for tool in body.get("tools") or ()]
    last = messages[-1]
    results = [message["content"] for message in messages if message["role"] == "tool"]
    choice = body.get("tool_choice", "auto")
    is_cut = CUT in str(last["content"])
    if isinstance(choice, dict):
        functions = [function for function in functions if function["name"] == choice["function"]["name"]]
    person = next((function for function in functions if "age" in str(function["parameters"])), None)
    weather = next((function for function in functions if "city" in str(function["parameters"])), None)
    if person is not None and choice != "none":
        return _call(person["name"], PERSON, is_cut)
    if weather is not None and choice != "none" and last["role"] == "user" and "weather" in last["content"]:
        return _call(weather["name"], ARGUMENTS, is_cut)
    if body.get("response_format"):
        text = json.dumps(PERSON)
        return {"content": text[: len(text) // 2] if is_cut else text}
    if last["role"] == "tool":
        return {"content": f"It is {results[-1] or 'unknown'} in Paris."}
    questions = [message["content"] for message in messages if message["role"] == "user"]
    if len(questions) > 1:
        answers = [message["content"] for message in messages if message["role"] == "assistant" and message["content"]]
        return {"content": f"Question {len(questions)}; before I said: {answers[-1]}"}
    return {"content": CAPITAL}


def _call(name: str, arguments: dict[str, Any], is_cut: bool) -> dict[str, Any]:
    text = json.dumps(arguments)
    function = {"name": name, "arguments": text[: len(text) // 2] if is_cut else text}
    return {"content": None, "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}
