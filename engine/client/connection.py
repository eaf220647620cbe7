"""JSON and server-sent events over HTTP, with timeouts, retries, and errors as exceptions."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from engine.client.throttle import Throttle, admitted
from engine.protocol.types import (
    EngineUnavailable,
    EngineUnreachable,
    InvalidRequest,
    Prompt,
    TemplateKwargs,
    Tokens,
)
from engine.protocol.wire import Json, error_from_json, stream_error

TRACEPARENT = ContextVar("traceparent", default="")
"""The position in a trace (W3C ``traceparent``) that requests carry; empty without one."""
_TIMEOUT = httpx.Timeout(connect=5.0, write=30.0, pool=None, read=600.0)
"""Only a large score request is silent for long: generation streams carry keep-alives. A request waits for a free
connection as long as those before it take, within its own time limit."""
_LIMITS = httpx.Limits(max_connections=1024, max_keepalive_connections=256)
"""A search sends as many requests at once as it has branches with different parents."""
_BACKOFF = (0.1, 0.3, 0.9)
"""Seconds before each retry."""
_RETRY_ONCE = (0.0,)
"""The backoff for calls whose answer is soon out of date: one retry, since a pooled connection may be stale."""
_DEFAULT_PAUSE_SECONDS = 1.0
"""After a refusal for lack of capacity that does not tell how long."""
_UPSTREAM_RETRY_AFTER = "llm_provider-retry-after"
"""The name under which LiteLLM's proxy passes the header of a server, and its own, on."""
_RETRYABLE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.RemoteProtocolError, httpx.ReadError)
"""Failures before any part of the response. All requests are idempotent: a response depends on the request alone, and
the server cancels the work of a broken connection."""


class Connection:
    """A server at ``http://host:port`` or ``unix:///path/to/socket``.

    Belongs to the event loop that it is first used in. Raises the exceptions of ``engine.protocol.types`` only.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, should_wait: bool = True, throttle: Throttle | None = None
    ) -> None:
        """Create a client without connecting. Raises ``InvalidRequest`` for any other URL.

        The URL may end in ``/v1``, as OpenAI's clients expect it. ``api_key``: sent as a bearer token.
        ``should_wait``: retry for a second or two while the server cannot be reached, and not only once.
        ``throttle``: the server's limits, for requests with a prompt.
        """
        self._throttle = throttle
        url = url.rstrip("/").removesuffix("/v1")
        self.url = hide_login(url)
        self.api_key = api_key
        self.should_wait = should_wait
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
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(base_url=base, transport=transport, timeout=_TIMEOUT, headers=headers)

    async def call(self, method: str, path: str, body: Json | None, *, should_wait: bool = True) -> Any:
        """Return the JSON value of the response. ``should_wait``: as for the constructor."""
        async with admitted(self._throttle, path, body) as use:
            response = await self._send(method, path, body, self._backoff if should_wait else _RETRY_ONCE)
            content = await self._read(response)
            value = await self._parse(response, content)
            if isinstance(value, dict):
                use.read(value)
            return value

    async def check(self, path: str) -> None:
        """Raise ``EngineError`` if the server answers that it has failed (5xx).

        A gateway may lack the path or guard it.
        """
        response = await self._send("GET", path, None, _RETRY_ONCE)
        content = await self._read(response)
        if response.is_server_error:
            await self._parse(response, content)

    async def events(
        self, path: str, body: Json, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Json, None]:
        """Yield the JSON objects of a server-sent event stream, up to ``[DONE]`` or its end.

        Raises the exception for an object that is an error.
        """
        async with admitted(self._throttle, path, body) as use:
            response = await self._send("POST", path, body, self._backoff, headers)
            try:
                if response.status_code != httpx.codes.OK:
                    await self._parse(response, await response.aread())
                async with aclosing(_read_events(response, self._source)) as stream:
                    async for event in stream:
                        use.read(event)
                        yield event
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
        functions_apart: bool = False,
    ) -> Tokens:
        """Return the token ids from ``/tokenize``, which our server, vLLM and SGLang share.

        ``functions_apart``: the server takes the template's variable ``tools`` in a field of its own.
        """
        content: Json = {"messages": text, "add_generation_prompt": generation_prompt}
        if template_kwargs:
            variables = dict(template_kwargs)
            if functions_apart and "tools" in variables:
                content["tools"] = variables.pop("tools")
            content["chat_template_kwargs"] = variables
        if isinstance(text, str):
            content = {"prompt": text, "add_special_tokens": special}
        return tuple((await self.call("POST", "/tokenize", {"model": model, **content}))["tokens"])

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | None,
        backoff: Sequence[float],
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Return the response, of which only the headers are read."""
        num_retries = len(backoff)
        if trace := TRACEPARENT.get():
            headers = {**(headers or {}), "traceparent": trace}
        for attempt in range(num_retries + 1):
            request = self._http.build_request(method, path, json=body, headers=headers)
            try:
                return await self._http.send(request, stream=True)
            except _RETRYABLE as error:
                if attempt == num_retries:
                    raise EngineUnreachable(str(self._unavailable(error))) from error
                await asyncio.sleep(backoff[attempt])
            except httpx.HTTPError as error:
                raise self._unavailable(error) from error
        raise AssertionError("the last attempt returns or raises")

    async def _read(self, response: httpx.Response) -> bytes:
        """Return the content of a response, and close it."""
        try:
            return await response.aread()
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        finally:
            await response.aclose()

    @property
    def _source(self) -> str:
        return f"the engine at {self.url}"

    async def _parse(self, response: httpx.Response, content: bytes) -> Any:
        """Return the JSON value of a response. Raises the exception of an error.

        A refusal for lack of capacity pauses all who share the throttle.
        """
        try:
            value = json.loads(content)
        except ValueError:
            value = None
        if response.status_code != httpx.codes.OK:
            headers = response.headers
            retry_after = _seconds(headers.get("Retry-After", headers.get(_UPSTREAM_RETRY_AFTER)))
            if response.status_code == httpx.codes.TOO_MANY_REQUESTS and self._throttle is not None:
                await self._throttle.pause(_DEFAULT_PAUSE_SECONDS if retry_after is None else retry_after)
            raise error_from_json(response.status_code, value, source=self._source, retry_after=retry_after)
        if value is None:
            raise EngineUnavailable(f"the response of {self._source} is not JSON")
        return value

    def _unavailable(self, error: Exception) -> EngineUnavailable:
        reason = str(error) or type(error).__name__
        return EngineUnavailable(f"the engine at {self.url} could not be reached: {reason}")


@functools.cache
def _get_ssl_context() -> ssl.SSLContext:
    return httpx.create_ssl_context()


async def _read_events(response: httpx.Response, source: str) -> AsyncGenerator[Json, None]:
    rest = b""
    async for data in response.aiter_bytes():  # several times as fast as decoded lines
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                return
            event = json.loads(content)
            if "error" in event:
                raise stream_error(event, source)
            yield event


def hide_login(url: str) -> str:
    """Return the URL without a user's name and password, for messages, logs and metrics."""
    login, at, _ = urlsplit(url).netloc.rpartition("@")
    return url.replace(login + at, "", 1)


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header, which may also be a date."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (date - datetime.now(date.tzinfo or UTC)).total_seconds())
