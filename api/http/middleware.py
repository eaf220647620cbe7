"""What happens to every request before and after its route: an id, a log line, a count, the size limit."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from api.http.metrics import HTTP_REQUESTS, HTTP_SECONDS, HTTP_STREAMS
from api.http.problems import Problem, problem_response, refuse
from workers.config.settings import Settings
from workers.store.request_origin import ORIGIN, Origin
from workers.telemetry import tracing

_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = structlog.get_logger("reasoner.api")


class Observe:
    """Gives each request an id (the client's, if it sent a sane one), logs it without its content, and counts it.

    It is also where an error that nobody expected becomes a problem document.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _SANE_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status, streams = time.perf_counter(), 0, False

        open_stream = contextlib.ExitStack()

        async def observed_send(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                if headers.get("content-type", "").startswith("text/event-stream"):
                    streams = True
                    open_stream.enter_context(HTTP_STREAMS.track_inprogress())
            await send(message)

        about = {"method": scope["method"], "path": scope["path"]}
        with bound_contextvars(request_id=request_id), _span(scope, request_id):
            origin = ORIGIN.set(Origin(request_id, tracing.traceparent()))
            try:
                await self._app(scope, receive, observed_send)
            except asyncio.CancelledError:
                # The server stops and has waited for long enough. Whoever follows a job comes back for the rest of it.
                if not streams:
                    raise
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except Exception:
                log.exception("request failed", **about)
                if status:  # the client has half an answer: only a broken connection tells it so
                    raise
                problem = Problem(500, "internal", "this is our fault; the log has the details under this request id")
                await problem_response(problem, request_id)(scope, receive, observed_send)
            finally:
                open_stream.close()
                ORIGIN.reset(origin)
                seconds = time.perf_counter() - started
                route = getattr(scope.get("route"), "path", "unknown")
                told = {tracing.ROUTE: route, tracing.HTTP_STATUS: status}
                tracing.describe(told, name=f"{scope['method']} {route}")
                HTTP_REQUESTS.labels(scope["method"], route, str(status)).inc()
                HTTP_SECONDS.labels(scope["method"], route).observe(seconds)
                log.info("request", **about, status=status, ms=round(seconds * 1000, 1))


def _span(scope: Scope, request_id: str) -> contextlib.AbstractContextManager[None]:
    """Of a request that does something: those who only look whether we are well would fill every trace."""
    if scope["path"] in _PROBES:
        return contextlib.nullcontext()
    about = {tracing.METHOD: scope["method"], tracing.REQUEST_ID: request_id}
    return tracing.span(scope["method"], "server", about, Headers(scope=scope).get("traceparent", ""))


class LimitBody:
    """Refuses bodies over the cap, whether or not they admit their length."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._cap = settings.body_cap

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length) > self._cap:
            await refuse(scope, self._problem())(scope, receive, send)
            return
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._cap:
                raise self._problem()
            return message

        await self._app(scope, counted_receive, send)

    def _problem(self) -> Problem:
        return Problem(413, "body-too-large", f"the body may have {self._cap} bytes at most")
