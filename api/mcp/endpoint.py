"""The endpoint ``/mcp``: the protocol over streamable HTTP, without sessions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from api.http.authentication import check_origin
from api.http.problems import Problem
from api.http.request_parsing import parse_json
from api.mcp.errors import PATH
from workers.config.settings import Settings

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

INSTALL = "pip install 'reasoner[mcp]'"
NOT_INSTALLED = Problem(501, "mcp-not-installed", f"this service is installed without the package 'mcp': {INSTALL}")


class McpEndpoint:
    """An ASGI application that starts the protocol's server at its first request, since that takes a second."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._starting: asyncio.Task[StreamableHTTPSessionManager] | None = None
        self._running: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ``Problem`` for one that is not for this endpoint."""
        if scope["method"] != "POST":
            detail = f"{PATH} does not take {scope['method']}: it takes POST, and keeps no sessions"
            raise Problem(405, "method-not-allowed", detail, headers={"Allow": "POST"})
        check_origin(Headers(scope=scope), self._settings.cors_origins)
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        parse_json(body)
        if self._starting is None or self._has_failed:
            self._starting = asyncio.create_task(self._start())
        manager = await asyncio.shield(self._starting)
        await manager.handle_request(scope, _replay(body, receive), send)

    @property
    def _has_failed(self) -> bool:
        """True if the server could not be started, or has ended by itself."""
        starting, running = self._starting, self._running
        has_failed = starting is not None and starting.done() and (starting.cancelled() or starting.exception())
        return bool(has_failed) or (running is not None and running.done())

    async def stop(self) -> None:
        """End the server, and the requests that it still answers."""
        self._stopping.set()
        if self._running is not None:
            await self._running

    async def _start(self) -> StreamableHTTPSessionManager:
        """Return the manager of requests, with its task group running until ``stop``."""
        manager = await asyncio.to_thread(_build_manager, self._settings)
        is_ready = asyncio.Event()

        async def run() -> None:
            async with manager.run():
                is_ready.set()
                await self._stopping.wait()

        self._running = asyncio.create_task(run())
        ready = asyncio.create_task(is_ready.wait())
        await asyncio.wait({self._running, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._running.done():
            self._running.result()
        return manager


def _build_manager(settings: Settings) -> StreamableHTTPSessionManager:
    """Return the manager of requests to a server for the jobs of this process. Raises ``Problem`` without ``mcp``."""
    try:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("mcp"):
            raise
        raise NOT_INSTALLED from None
    from sse_starlette.sse import AppStatus

    from api.mcp.jobs import StoredJobs
    from api.mcp.server import build_server
    from api.mcp.tools import Context

    def find_jobs(context: Context) -> StoredJobs:
        request = context.request
        assert isinstance(request, Request)
        return StoredJobs(request.app.state.service, request.state.principal)

    # It would cut off streams when the process begins to shut down, and so cancel their jobs. They end by themselves.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    server = build_server(find_jobs, settings.retention_seconds)
    return StreamableHTTPSessionManager(server, stateless=True, max_request_body_size=settings.body_cap)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body, which was read already, and then what comes after it."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
