"""A real server on a Unix socket, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from engine.local import LocalEngine
from engine.server import create_app


@contextmanager
def served(engine: LocalEngine, path: Path) -> Iterator[str]:
    """The URL of the engine's server, while it runs."""
    app = create_app(engine)
    server = _Server(
        uvicorn.Config(app, uds=str(path), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.ready.wait(30)
    yield f"unix://{path}"
    server.should_exit = True
    thread.join(30)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()
