"""JSON and server-sent events over HTTP, with timeouts, retries, and errors as exceptions."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from engine.protocol.types import (
    EngineUnavailable,
    EngineUnreachable,
    TokenIds,
    TokenizeRequest,
)
from engine.protocol.wire import Json, error_from_json, stream_error
from engine.remote.http_clients import HttpClients
from engine.remote.retries import Retries
from engine.remote.throttle import Throttle, admitted
from engine.remote.urls import hide_login

TRACEPARENT = ContextVar("traceparent", default="")
"""The position in a trace (W3C ``traceparent``) that requests carry; empty without one."""
SILENCE_SECONDS = 600.0
"""The longest silence of a server within a response. Only a large score request is silent for long, and a hosted model
that hides what it thinks: generation streams carry keep-alives."""
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
        self,
        url: str,
        *,
        api_key: str | None = None,
        should_wait: bool = True,
        throttle: Throttle | None = None,
        silence_seconds: float = SILENCE_SECONDS,
        clients: HttpClients | None = None,
    ) -> None:
        """Create a client without connecting. Raises ``InvalidRequest`` for any other URL.

        The URL may end in ``/v1``, as OpenAI's clients expect it. ``api_key``: sent as a bearer token.
        ``should_wait``: retry for a second or two while the server cannot be reached, and not only once.
        ``throttle``: the server's limits, for requests with a prompt. ``silence_seconds``: the time without any data
        after which a response counts as lost. ``clients``: shares their open connections, and stays open.
        """
        url = url.rstrip("/").removesuffix("/v1")
        self.silence_seconds = silence_seconds
        self.url = hide_login(url)
        self.api_key = api_key
        self.should_wait = should_wait
        self._throttle = throttle
        self._own_clients: HttpClients | None = None
        if clients is None:
            clients = self._own_clients = HttpClients()
        client = clients.get(url, silence_seconds)
        self._http, self._via = client.http, client.via

    async def call(self, method: str, path: str, body: Json | None, *, should_wait: bool = True) -> Any:
        """Return the JSON value of the response. ``should_wait``: False if the answer is soon out of date."""
        async with admitted(self._throttle, path, body) as use:
            response = await self._send(method, path, body, is_urgent=not should_wait)
            content = await self._read_content(response)
            value = await self._parse(response, content)
            if isinstance(value, dict):
                use.read(value)
            return value

    async def check(self, path: str) -> None:
        """Raise ``EngineError`` if the server answers that it has failed (5xx).

        A gateway may lack the path or guard it.
        """
        response = await self._send("GET", path, None, is_urgent=True)
        content = await self._read_content(response)
        if response.is_server_error:
            await self._parse(response, content)

    async def events(
        self, path: str, body: Json, headers: Mapping[str, str] | None = None, *, counts_keep_alives: bool = True
    ) -> AsyncGenerator[Json, None]:
        """Yield the JSON objects of a server-sent event stream, up to ``[DONE]`` or its end; one if it is no stream.

        Raises the exception for an object that is an error. ``counts_keep_alives``: False if comments do not end a
        silence, as those of a gateway whose model never answers.
        """
        async with admitted(self._throttle, path, body) as use:
            response = await self._send("POST", path, body, headers)
            try:
                kind = response.headers.get("content-type", "none")
                if response.status_code != httpx.codes.OK or kind.startswith("application/json"):
                    value = await self._parse(response, await response.aread())
                    use.read(_check_object(value, self.source))
                    yield value
                    return
                is_empty = True
                silence = None if counts_keep_alives else self.silence_seconds
                async with aclosing(_read_events(response, self.source)) as stream:
                    while (event := await self._next_event(stream, silence)) is not None:
                        is_empty = False
                        use.read(event)
                        yield event
                if is_empty:
                    raise not_a_completion(self.source, f"content-type {kind}, and no event in it")
            except (httpx.HTTPError, ValueError) as error:
                raise self._create_unavailable_error(error) from error
            finally:
                await response.aclose()

    async def _next_event(self, stream: AsyncGenerator[Json, None], silence: float | None) -> Json | None:
        """Return the next event, ``None`` at the end. Raises ``EngineUnreachable`` after ``silence`` seconds."""
        if silence is None:
            return await anext(stream, None)
        wait = asyncio.timeout(silence)
        try:
            async with wait:
                return await anext(stream, None)
        except TimeoutError:
            if not wait.expired():
                raise
            raise self._create_silence_error() from None

    async def tokenize(self, request: TokenizeRequest, *, functions_apart: bool = False) -> TokenIds:
        """Return the token ids from ``/tokenize``, which our server, vLLM and SGLang share.

        ``functions_apart``: the server takes the template's variable ``tools`` in a field of its own.
        """
        content: Json = {"messages": request.text, "add_generation_prompt": request.generation_prompt}
        if request.template_kwargs:
            variables = dict(request.template_kwargs)
            if functions_apart and "tools" in variables:
                content["tools"] = variables.pop("tools")
            content["chat_template_kwargs"] = variables
        if isinstance(request.text, str):
            content = {"prompt": request.text, "add_special_tokens": request.special}
        answer = await self.call("POST", "/tokenize", {"model": request.model, **content})
        try:
            return tuple(map(int, answer["tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnavailable(f"{self.source} did not answer /tokenize with tokens: {error!r}") from error

    async def close(self) -> None:
        if self._own_clients is not None:
            await self._own_clients.close()

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | None,
        headers: Mapping[str, str] | None = None,
        *,
        is_urgent: bool = False,
    ) -> httpx.Response:
        """Return the response, of which only the headers are read."""
        retries = Retries.of_connections(should_wait=self.should_wait, is_urgent=is_urgent)
        headers = dict(headers or {})
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if trace := TRACEPARENT.get():
            headers["traceparent"] = trace
        while True:
            request = self._http.build_request(method, path, json=body, headers=headers)
            try:
                return await self._http.send(request, stream=True)
            except _RETRYABLE as error:
                wait = retries.next_wait()
                if wait is None:
                    raise EngineUnreachable(str(self._create_unavailable_error(error))) from error
                await asyncio.sleep(wait)
            except httpx.ReadTimeout as error:
                raise self._create_silence_error() from error
            except httpx.HTTPError as error:
                raise self._create_unavailable_error(error) from error

    async def _read_content(self, response: httpx.Response) -> bytes:
        """Return the content of a response, and close it."""
        try:
            return await response.aread()
        except httpx.HTTPError as error:
            raise self._create_unavailable_error(error) from error
        finally:
            await response.aclose()

    @property
    def source(self) -> str:
        """The server's name in messages."""
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
            retry_after = _parse_retry_after(headers.get("Retry-After", headers.get(_UPSTREAM_RETRY_AFTER)))
            if response.status_code == httpx.codes.TOO_MANY_REQUESTS and self._throttle is not None:
                await self._throttle.pause(_DEFAULT_PAUSE_SECONDS if retry_after is None else retry_after)
            raise error_from_json(response.status_code, value, source=self.source, retry_after=retry_after)
        if value is None:
            kind = response.headers.get("content-type", "none")
            raise EngineUnavailable(f"the response of {self.source} is not JSON: content-type {kind}")
        if isinstance(value, dict) and value.get("error") and "choices" not in value:
            raise stream_error(value, self.source)  # of a gateway that answered before its server had
        return value

    def _create_silence_error(self) -> EngineUnreachable:
        """Return the error of a server from which nothing comes: another attempt would take as long."""
        return EngineUnreachable(f"{self.source} has sent nothing for {self.silence_seconds:g} s")

    def _create_unavailable_error(self, error: Exception) -> EngineUnavailable:
        if isinstance(error, httpx.ReadTimeout):
            return self._create_silence_error()
        reason = str(error) or type(error).__name__
        return EngineUnavailable(f"{self.source} could not be reached{self._via}: {reason}")


async def _read_events(response: httpx.Response, source: str) -> AsyncGenerator[Json, None]:
    rest = b""
    async for data in response.aiter_bytes():  # several times as fast as decoded lines
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if (event := _read_event(line, source)) is _END:
                return
            if event is not None:
                yield event
    event = _read_event(rest, source)
    if event is not None and event is not _END:
        yield event


_END: Json = {}
"""The mark at the end of a stream."""


def _read_event(line: bytes, source: str) -> Json | None:
    """Return the object in a line of a stream, ``None`` for a line without one, and ``_END`` for the end."""
    line = line.removeprefix(codecs.BOM_UTF8)
    if not line.startswith(b"data:"):
        return None
    content = line[5:].strip()
    if content == b"[DONE]":
        return _END
    try:
        event = _check_object(json.loads(content), source)
    except ValueError as error:
        raise not_a_completion(source, f"one of its events is not JSON ({error})") from error
    if event.get("error"):
        raise stream_error(event, source)
    return event


def _check_object(value: Any, source: str) -> Json:
    if not isinstance(value, dict):
        raise not_a_completion(source, f"one of its events is {type(value).__name__} instead of an object")
    return value


def not_a_completion(source: str, problem: str) -> EngineUnavailable:
    """Return the error of a server whose answer has another form than OpenAI's: a proxy's page, or one cut short."""
    return EngineUnavailable(f"the answer of {source} is not an OpenAI completion: {problem}")


def _parse_retry_after(text: str | None) -> float | None:
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
