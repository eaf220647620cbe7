"""Middleware of every request: an id, a log line, metrics, security headers and the size limit of the body."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from api.http.metrics import HTTP_REQUESTS, HTTP_SECONDS, HTTP_STREAMS
from api.http.multipart import OVERHEAD_BYTES
from api.http.problems import INTERNAL, Problem, problem_response, refusal_response
from workers.config.settings import Settings
from workers.store.request_origin import ORIGIN, Origin
from workers.telemetry import tracing

_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
UPLOAD = ("POST", "/v1/files")
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

PAGE_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
_SECURITY_HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

log = structlog.get_logger("reasoner.api")


class RequestLogMiddleware:
    """Gives each request an id (the client's, if it is well-formed), logs it without its content, and counts it.

    An unexpected exception becomes a problem document here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if _VALID_REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status, is_stream = time.perf_counter(), 0, False
        open_stream = contextlib.ExitStack()

        async def observed_send(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                if headers.get("content-type", "").startswith("text/event-stream"):
                    is_stream = True
                    open_stream.enter_context(HTTP_STREAMS.track_inprogress())
            await send(message)

        attributes = {"method": scope["method"], "path": scope["path"]}
        with bound_contextvars(request_id=request_id), _open_span(scope, request_id):
            origin = ORIGIN.set(Origin(request_id, tracing.traceparent()))
            try:
                await self._app(scope, receive, observed_send)
            except asyncio.CancelledError:
                # The server stops, after its grace period. Clients that follow a job connect again for the rest.
                if not is_stream:
                    raise
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except Exception:
                log.exception("request failed", **attributes)
                if status:  # after the headers only a broken connection can signal the error
                    raise
                await problem_response(INTERNAL, request_id)(scope, receive, observed_send)
            finally:
                open_stream.close()
                ORIGIN.reset(origin)
                _record(scope, status, time.perf_counter() - started)


def _record(scope: Scope, status: int, seconds: float) -> None:
    """Describe a finished request in its span, the metrics and the log."""
    method, route = scope["method"], getattr(scope.get("route"), "path", "unknown")
    tracing.describe({tracing.ROUTE: route, tracing.HTTP_STATUS: status}, name=f"{method} {route}")
    HTTP_REQUESTS.labels(method, route, str(status)).inc()
    HTTP_SECONDS.labels(method, route).observe(seconds)
    log.info("request", method=method, path=scope["path"], status=status, ms=round(seconds * 1000, 1))


def _open_span(scope: Scope, request_id: str) -> contextlib.AbstractContextManager[None]:
    """Return the span of a request; health checks and scrapes have none, since they would fill every trace."""
    if scope["path"] in _PROBES:
        return contextlib.nullcontext()
    attributes = {tracing.METHOD: scope["method"], tracing.REQUEST_ID: request_id}
    return tracing.span(scope["method"], "server", attributes, Headers(scope=scope).get("traceparent", ""))


class SecurityHeadersMiddleware:
    """Adds security headers that the route has not set: own scripts only, no type sniffing, no frames, no caching."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/v1/"):  # questions and answers are private
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, send_with_headers)


class BodyLimitMiddleware:
    """Refuses bodies over ``body_cap`` bytes, whether or not their ``Content-Length`` says so.

    The body of an upload has a limit of its own, since it is never in memory as a whole.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._body_cap = settings.body_cap
        self._upload_cap = settings.file_cap + OVERHEAD_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_upload = (scope["method"], scope["path"]) == UPLOAD
        max_bytes = self._upload_cap if is_upload else self._body_cap
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > max_bytes:
            await refusal_response(scope, _too_large(max_bytes))(scope, receive, send)
            return
        num_received = 0

        async def counting_receive() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > max_bytes:
                raise _too_large(max_bytes)
            return message

        await self._app(scope, counting_receive, send)


def _too_large(max_bytes: int) -> Problem:
    return Problem(413, "body-too-large", f"the body is larger than the limit of {max_bytes} bytes")


class ContentEncodingMiddleware:
    """Refuses compressed bodies with 415: their size would say nothing about the size of their content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = Headers(scope=scope).get("content-encoding", "identity") if scope["type"] == "http" else "identity"
        if encoding.strip().lower() in ("", "identity"):
            await self._app(scope, receive, send)
            return
        detail = "the body is compressed, which this service does not read: send it without Content-Encoding"
        problem = Problem(415, "unsupported-encoding", detail, headers={"Accept-Encoding": "identity"})
        await refusal_response(scope, problem)(scope, receive, send)


class SubPathMiddleware:
    """Removes the setting ``root_path`` from the beginning of paths, for proxies that leave it there."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._prefix = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._prefix and scope["type"] == "http":
            if scope["path"] == self._prefix:  # the page's own links begin below it
                await RedirectResponse(f"{self._prefix}/", 308)(scope, receive, send)
                return
            if scope["path"].startswith(f"{self._prefix}/"):
                raw = scope["raw_path"].removeprefix(self._prefix.encode())
                scope = {**scope, "path": scope["path"].removeprefix(self._prefix), "raw_path": raw}
        await self._app(scope, receive, send)
