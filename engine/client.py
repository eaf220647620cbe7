"""``EngineClient`` over HTTP. Imports no torch, so a worker that uses it starts in an instant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import httpx

from engine.types import (
    Completion,
    Delta,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
)
from engine.wire import Json, completion_from_json, delta_from_json, error_from_json, model_from_json, score_from_json

_TIMEOUT = httpx.Timeout(connect=5.0, write=30.0, pool=60.0, read=600.0)
"""A generation stream is never silent for long (the server sends keep-alives); a large score request may be."""
_LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64)
_BACKOFF = (0.1, 0.3, 0.9)
"""Seconds before each new attempt to reach the engine."""
_DEFAULTS = asdict(SamplingParams())
_RETRIED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError)
"""Failures after which a request is sent again, if nothing of its answer had arrived. All requests are safe to repeat:
an answer depends on the request alone, and the server stops the work of a connection that broke."""


class HttpEngine:
    """An engine server at ``http://host:port`` or ``unix:///path/to/socket``.

    Belongs to the event loop that it is first used in. Raises the exceptions of ``engine.types`` only.
    """

    def __init__(self, url: str) -> None:
        """Does not connect yet. Raises ``InvalidRequest`` for a URL of another kind."""
        self._url = url
        if url.startswith("unix://"):
            transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix://"), limits=_LIMITS)
            base = "http://engine"
        elif url.startswith(("http://", "https://")):
            transport, base = httpx.AsyncHTTPTransport(limits=_LIMITS), url
        else:
            raise InvalidRequest(f"engine URL {url!r} must be http://host:port or unix:///path/to/socket", "url")
        self._http = httpx.AsyncClient(base_url=base, transport=transport, timeout=_TIMEOUT)

    async def generate(
        self, request: GenerateRequest, *, stream: bool = False
    ) -> AsyncGenerator[Completion | Delta, None]:
        """See ``EngineClient``."""
        left = len(request.branches)
        async with aclosing(self._events("/v1/completions", _generate_body(request, stream))) as events:
            async for event in events:
                if "delta" in event:
                    yield delta_from_json(event["delta"])
                elif "completion" in event:
                    left -= 1
                    yield completion_from_json(event["completion"])
                else:
                    raise error_from_json(500, event)
        if left:
            raise EngineUnavailable(f"the engine at {self._url} ended its answer with {left} branches missing")

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """See ``EngineClient``."""
        body = {
            "request_id": request.request_id,
            "model": request.model,
            "items": [{"parts": item.parts, "read": item.read} for item in request.items],
            "token_ids": request.token_ids,
            "max_compute": request.max_compute,
            **_service(request),
        }
        answer = await self._call("POST", "/v1/score", body)
        return [score_from_json(result) for result in answer["results"]]

    async def abort(self, request_id: str) -> None:
        """See ``EngineClient``."""
        await self._call("POST", "/v1/abort", {"request_id": request_id})

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """See ``EngineClient``."""
        await self._call("POST", "/v1/leases/release", {"lease": lease, "tokens": tokens})

    async def tokenize(self, model: str, text: str | Sequence[dict[str, str]]) -> tuple[int, ...]:
        """See ``EngineClient``."""
        content = {"prompt": text} if isinstance(text, str) else {"messages": list(text)}
        answer = await self._call("POST", "/tokenize", {"model": model, **content})
        return tuple(answer["tokens"])

    async def models(self) -> list[ModelInfo]:
        """See ``EngineClient``."""
        answer = await self._call("GET", "/v1/models", None)
        return [model_from_json(model) for model in answer["data"]]

    async def clear_cache(self) -> None:
        """See ``EngineClient``."""
        await self._call("POST", "/v1/cache/clear", {})

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: Json | None) -> Any:
        response = await self._send(method, path, body)
        try:
            content = await response.aread()
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        finally:
            await response.aclose()
        return _parse(response.status_code, content)

    async def _events(self, path: str, body: Json) -> AsyncGenerator[Json, None]:
        """The JSON objects of a server-sent event stream, up to its ``[DONE]``."""
        response = await self._send("POST", path, body)
        try:
            if response.status_code != httpx.codes.OK:
                _parse(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
        except (httpx.HTTPError, ValueError) as error:
            raise self._unavailable(error) from error
        finally:
            await response.aclose()

    async def _send(self, method: str, path: str, body: Json | None) -> httpx.Response:
        """The response with its headers read, after as many attempts as it takes to reach the engine."""
        attempts = len(_BACKOFF)
        for attempt in range(attempts + 1):
            request = self._http.build_request(method, path, json=body)
            try:
                return await self._http.send(request, stream=True)
            except _RETRIED as error:
                if attempt == attempts:
                    raise self._unavailable(error) from error
                await asyncio.sleep(_BACKOFF[attempt])
            except httpx.HTTPError as error:
                raise self._unavailable(error) from error
        raise AssertionError("the last attempt returns or raises")

    def _unavailable(self, error: Exception) -> EngineUnavailable:
        reason = str(error) or type(error).__name__
        return EngineUnavailable(f"the engine at {self._url} could not be reached: {reason}")


def _generate_body(request: GenerateRequest, stream: bool) -> Json:
    """The prompt once for all branches, and only the settings that are set."""
    sampling = asdict(request.sampling)
    if request.sampling.logit_bias:
        sampling["logit_bias"] = dict(request.sampling.logit_bias)
    body: Json = {
        "request_id": request.request_id,
        "model": request.model,
        "prompt": request.prompt,
        "branches": [
            {"seed": b.seed, "key": b.key, "max_tokens": b.max_tokens}
            | ({"generated": b.generated} if b.generated else {})
            for b in request.branches
        ],
        "stream_choices": True,
        "stream": stream,
        **{name: value for name, value in sampling.items() if value != _DEFAULTS[name]},
        **_service(request),
    }
    return body if request.timeout is None else body | {"timeout": request.timeout}


def _service(request: GenerateRequest | ScoreRequest) -> Json:
    """How the engine is to treat the request, as far as it says."""
    wanted = {"priority": request.priority, "lease": request.lease, "cache_salt": request.cache_salt}
    return {name: value for name, value in wanted.items() if value}


def _parse(status: int, content: bytes) -> Any:
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    if status != httpx.codes.OK:
        raise error_from_json(status, value)
    if value is None:
        raise EngineUnavailable("the engine's answer is not JSON")
    return value
