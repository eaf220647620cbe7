"""A real engine server on a Unix socket, in a thread of this process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from engine.core.local_engine import LocalEngine
from engine.server.app import create_app
from tests.listening import listening


def served(engine: LocalEngine, path: Path) -> AbstractContextManager[str]:
    """Yield the URL of the running server."""
    return listening(create_app(engine), path)
