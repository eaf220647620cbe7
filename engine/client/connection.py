"""JSON and server-sent events over HTTP, with timeouts, retries, and errors as exceptions."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx

from engine.protocol.types import EngineUnavailable, InvalidRequest, Prompt, TemplateKwargs, Tokens
from engine.protocol.wire import Json, error_from_json

_TIMEOUT = httpx.Timeout(connect=5.0, write=30.0, pool=60.0, read=600.0)
"""Only a large score request is silent for long: generation streams carry keep-alives."""
_LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64)
_BACKOFF = (0.1, 0.3, 0.9)
"""Seconds before each retry."""
_RETRY_ONCE = (0.0,)
"""The backoff for calls whose answer is soon out of date: one retry, since a pooled connection may be stale."""
_RETRYABLE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError)
"""Failures before any part of the response. All requests are idempotent: a response depends on the request alone, and
the server cancels the work of a broken connection."""


class Connection:
    """A server at ``http://host:port`` or ``unix:///path/to/socket``.

    Belongs to the event loop that it is first used in. Raises the exceptions of ``engine.protocol.types`` only.
    """

    def __init__(self, url: str, *, should_wait: bool = True) -> None:
        """Create a client without connecting. Raises ``InvalidRequest`` for any other URL.

        ``should_wait``: retry for a second or two while the server cannot be reached, and not only once.
        """
        self.url = url
        self._backoff = _BACKOFF if should_wait else _BACKOFF[:1]
        if url.startswith("unix://"):
            transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix://"), limits=_LIMITS, verify=False)
            base = "http://engine"
        elif url.startswith(("http://", "https://")):
            # Reading the certificates takes longer than a short job, and each job has its own connections.
            verify = _get_ssl_context() if url.startswith("https://") else False
            transport, base = httpx.AsyncHTTPTransport(limits=_LIMITS, verify=verify), url
        else:
            raise InvalidRequest(f"engine URL {url!r} must be http://host:port or unix:///path/to/socket", "url")
        self._http = httpx.AsyncClient(base_url=base, transport=transport, timeout=_TIMEOUT)

    async def call(self, method: str, path: str, body: Json | None, *, should_wait: bool = True) -> Any:
        """Return the JSON value of the response. ``should_wait``: as for the constructor."""
        response = await self._send(method, path, body, self._backoff if should_wait else _RETRY_ONCE)
        try:
            content = await response.aread()
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        finally:
            await response.aclose()
        return _parse(response.status_code, content)

    async def events(self, path: str, body: Json) -> AsyncGenerator[Json, None]:
        """Yield the JSON objects of a server-sent event stream, up to ``[DONE]`` or its end."""
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

    async def tokenize(
        self,
        model: str,
        text: Prompt,
        *,
        special: bool,
        generation_prompt: bool,
        template_kwargs: TemplateKwargs | None = None,
    ) -> Tokens:
        """Return the token ids from ``/tokenize``, which our server, vLLM and SGLang share."""
        content: Json = {"messages": text, "add_generation_prompt": generation_prompt}
        if template_kwargs:
            content["chat_template_kwargs"] = template_kwargs
        if isinstance(text, str):
            content = {"prompt": text, "add_special_tokens": special}
        return tuple((await self.call("POST", "/tokenize", {"model": model, **content}))["tokens"])

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, method: str, path: str, body: Json | None, backoff: Sequence[float]) -> httpx.Response:
        """Return the response, of which only the headers are read."""
        num_retries = len(backoff)
        for attempt in range(num_retries + 1):
            request = self._http.build_request(method, path, json=body)
            try:
                return await self._http.send(request, stream=True)
            except _RETRYABLE as error:
                if attempt == num_retries:
                    raise self._unavailable(error) from error
                await asyncio.sleep(backoff[attempt])
            except httpx.HTTPError as error:
                raise self._unavailable(error) from error
        raise AssertionError("the last attempt returns or raises")

    def _unavailable(self, error: Exception) -> EngineUnavailable:
        reason = str(error) or type(error).__name__
        return EngineUnavailable(f"the engine at {self.url} could not be reached: {reason}")


@functools.cache
def _get_ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _parse(status: int, content: bytes) -> Any:
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    if status != httpx.codes.OK:
        raise error_from_json(status, value)
    if value is None:
        raise EngineUnavailable("the engine's response is not JSON")
    return value
