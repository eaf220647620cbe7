"""A proxy in front of a real engine that delays every response and records the requests.

It makes a small model slow enough to interrupt a search midway, in the same way on every machine.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

Asked = tuple[tuple[int, ...], int, int, tuple[int, ...]]
"""The identity of a continuation: prompt, seed, branch key and tokens generated before."""


class SlowEngine:
    """Context manager that listens on the socket ``path`` and forwards to the engine at the socket ``engine``."""

    def __init__(self, path: Path, engine: Path, seconds: float) -> None:
        self.url = f"unix://{path}"
        self.asked: list[Asked] = []
        """All branches of all completion requests, in the order of arrival."""
        self._seconds = seconds
        self.engine = engine
        app = Starlette(routes=[Route("/{path:path}", self._forward, methods=["GET", "POST"])])
        self._server = uvicorn.Server(
            uvicorn.Config(app, uds=str(path), log_level="warning", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> SlowEngine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        slow = request.url.path in ("/v1/completions", "/v1/score")
        if request.url.path == "/v1/completions":
            wanted = json.loads(body)
            for branch in wanted["branches"]:
                had = tuple(branch.get("generated", ()))
                self.asked.append((tuple(wanted["prompt"]), branch["seed"], branch["key"], had))
        client = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(self.engine), verify=False), timeout=60)
        upstream = await client.send(
            client.build_request(
                request.method,
                f"http://engine{request.url.path}",
                content=body,
                headers={"Content-Type": "application/json"},
            ),
            stream=True,
        )

        async def answer() -> AsyncIterator[bytes]:
            try:
                if slow:
                    await asyncio.sleep(self._seconds)
                async for chunk in upstream.aiter_bytes():
                    yield chunk
            finally:
                await upstream.aclose()
                await client.aclose()

        return StreamingResponse(answer(), upstream.status_code, media_type=upstream.headers.get("content-type"))
