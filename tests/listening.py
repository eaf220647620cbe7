"""Serve an application on a real Unix socket, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def listening(app: ASGIApp, path: Path) -> Iterator[str]:
    """Yield the URL of the application while it runs."""
    server = _Server(
        uvicorn.Config(app, uds=str(path), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.ready.wait(30)
    try:
        yield f"unix://{path}"
    finally:
        server.should_exit = True
        thread.join(30)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()
