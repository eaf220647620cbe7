"""JSON over HTTP to an engine server: time-outs, retries, event streams, and errors as exceptions."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx

from engine.protocol.types import EngineUnavailable, InvalidRequest
from engine.protocol.wire import Json, error_from_json

_TIMEOUT = httpx.Timeout(connect=5.0, write=30.0, pool=60.0, read=600.0)
"""A generation stream is never silent for long (the server sends keep-alives); a large score request may be."""
_LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64)
_BACKOFF = (0.1, 0.3, 0.9)
"""Seconds before each new attempt to reach the engine."""
_AT_ONCE = (0.0,)
"""The same for a question that is out of date a moment later: once more, as for a connection that had grown stale."""
_RETRIED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError)
"""Failures after which a request is sent again, if nothing of its answer had arrived. All requests are safe to repeat:
an answer depends on the request alone, and the server stops the work of a connection that broke."""


class Connection:
    """A server at ``http://host:port`` or ``unix:///path/to/socket``.

    Belongs to the event loop that it is first used in. Raises the exceptions of ``engine.protocol.types`` only.
    """

    def __init__(self, url: str, *, patient: bool = True) -> None:
        """Does not connect yet. Raises ``InvalidRequest`` for a URL of another kind. Without ``patient`` a request is
        sent again only once, as for a connection that had grown stale."""
        self.url = url
        self._backoff = _BACKOFF if patient else _BACKOFF[:1]
        if url.startswith("unix://"):
            transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix://"), limits=_LIMITS, verify=False)
            base = "http://engine"
        elif url.startswith(("http://", "https://")):
            # To read the certificates takes longer than a short job, and each job has connections of its own.
            trust = _trust() if url.startswith("https://") else False
            transport, base = httpx.AsyncHTTPTransport(limits=_LIMITS, verify=trust), url
        else:
            raise InvalidRequest(f"engine URL {url!r} must be http://host:port or unix:///path/to/socket", "url")
        self._http = httpx.AsyncClient(base_url=base, transport=transport, timeout=_TIMEOUT)

    async def call(self, method: str, path: str, body: Json | None, *, patient: bool = True) -> Any:
        """The JSON value that the server answers. Without ``patient`` one that cannot be reached is told at once."""
        response = await self._send(method, path, body, self._backoff if patient else _AT_ONCE)
        try:
            content = await response.aread()
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        finally:
            await response.aclose()
        return _parse(response.status_code, content)

    async def events(self, path: str, body: Json) -> AsyncGenerator[Json, None]:
        """The JSON objects of a server-sent event stream, up to its ``[DONE]`` or its end."""
        response = await self._send("POST", path, body, self._backoff)
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

    async def close(self) -> None:
        """Closes what is open."""
        await self._http.aclose()

    async def _send(self, method: str, path: str, body: Json | None, backoff: Sequence[float]) -> httpx.Response:
        """The response with its headers read, after as many attempts as it takes to reach the engine."""
        attempts = len(backoff)
        for attempt in range(attempts + 1):
            request = self._http.build_request(method, path, json=body)
            try:
                return await self._http.send(request, stream=True)
            except _RETRIED as error:
                if attempt == attempts:
                    raise self._unavailable(error) from error
                await asyncio.sleep(backoff[attempt])
            except httpx.HTTPError as error:
                raise self._unavailable(error) from error
        raise AssertionError("the last attempt returns or raises")

    def _unavailable(self, error: Exception) -> EngineUnavailable:
        reason = str(error) or type(error).__name__
        return EngineUnavailable(f"the engine at {self.url} could not be reached: {reason}")


@functools.cache
def _trust() -> ssl.SSLContext:
    """Whom a server may have its certificate from."""
    return httpx.create_ssl_context()


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
