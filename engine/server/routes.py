"""Routes of the engine server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest

from engine.core.local_engine import LocalEngine
from engine.protocol.streams import merge_streams
from engine.protocol.types import EngineError, Events, TokenizeRequest
from engine.protocol.wire import write_model
from engine.server.metrics import EngineCollector
from engine.server.openai import CompletionCall, build_response, stream_response
from engine.server.schema import AbortBody, CompletionBody, ReleaseBody, ScoreBody, TokenizeBody

_T = TypeVar("_T")


def build_router(engine: LocalEngine) -> APIRouter:
    """Return all routes of an engine. One piece, because each route is a closure over it."""
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, http: Request) -> Response:
        prompts = [
            await engine.tokenize_prompt(body.model, prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        ]
        call = CompletionCall(body, body.to_requests(prompts), engine.tokenizer(body.model))
        events = await _start_generation(engine, call)
        if body.stream or body.stream_choices:
            return StreamingResponse(stream_response(call, events), media_type="text/event-stream")
        return JSONResponse(await _run_while_connected(http, build_response(call, events)))

    @router.post("/v1/score", response_model=None)
    async def score(body: ScoreBody, http: Request) -> Response:
        results = await _run_while_connected(http, engine.score(body.to_request()))
        return JSONResponse({"model": body.model, "results": [asdict(result) for result in results]})

    @router.post("/v1/abort")
    async def abort(body: AbortBody) -> dict[str, str]:
        await engine.abort(body.request_id)
        return {"request_id": body.request_id}

    @router.post("/v1/leases/release")
    async def release(body: ReleaseBody) -> dict[str, str]:
        await engine.release(body.lease, None if body.tokens is None else tuple(body.tokens))
        return {"lease": body.lease}

    @router.post("/v1/cache/clear")
    async def clear_cache() -> dict[str, str]:
        await engine.clear_cache()
        return {"status": "cleared"}

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, object]:
        text = body.prompt if body.prompt is not None else body.messages or []
        tokens = await engine.tokenize(
            TokenizeRequest(
                body.model,
                text,
                special=body.add_special_tokens,
                generation_prompt=body.add_generation_prompt,
                template_kwargs=body.chat_template_kwargs,
            )
        )
        return {"tokens": tokens, "count": len(tokens)}

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        fixed = {"object": "model", "created": 0, "owned_by": "reasoner"}
        return {"object": "list", "data": [fixed | write_model(info) for info in await engine.models()]}

    @router.get("/healthz")
    async def healthz() -> Response:
        if engine.is_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": f"the engine has stopped: {engine.failure or 'it was closed'}"}, 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _start_generation(engine: LocalEngine, call: CompletionCall) -> Events:
    """Start the requests of all prompts, whose events come as one stream.

    A refused request raises here, where the error still becomes the status of the response.
    """
    streams: list[Events] = []
    for request in call.requests:
        try:
            streams.append(engine.generate(request, stream=call.body.stream))
        except EngineError:
            await engine.abort(request.request_id)  # those of earlier prompts
            raise
    return merge_streams(streams, call.body.width)


async def _run_while_connected(http: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of ``work``. If the client disconnects before, cancel it and raise ``HTTPException``."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_await_disconnect(http))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client closed the connection")
        return working.result()
    finally:
        for task in (working, disconnected):
            task.cancel()
        await asyncio.wait({working, disconnected})


async def _await_disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
