"""A whole service of one's own for as long as a command needs it: nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from api.serve import Supervisor
from workers.settings import Settings


@contextlib.contextmanager
def private_stack(settings: Settings, console: Console) -> Iterator[str]:
    """Starts API, worker, engine and broker in a folder and on a port of their own; yields the API's URL.

    On the way out, also after Ctrl-C, every process is stopped and the folder is removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="reasoner-"))
    own = settings.model_copy(
        update={"data_dir": folder, "host": "127.0.0.1", "port": _free_port(), "redis_url": None, "api_keys": ()}
    )
    try:
        with contextlib.ExitStack() as running:
            with console.status("starting") as status:
                stack = running.enter_context(Supervisor(own, log_dir=folder, on_progress=status.update))
            yield stack.url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
