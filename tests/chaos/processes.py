"""Real processes for tests that kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from api.roles.supervisor import engine_command
from workers.config.settings import Settings
from workers.processes.children import read_tail, spawn, stop

T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str, seconds: float = 60.0) -> T:
    """Poll until the condition returns a true value; fail with ``what`` at the time limit."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        pause.wait(0.05)  # other processes send no notification, so poll
    raise AssertionError(f"not within {seconds} s: {what}")


@contextlib.contextmanager
def process(command: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    running = spawn(command, log=log, env=os.environ | (env or {}), death_signal=signal.SIGKILL)
    try:
        yield running
    except BaseException as error:
        error.add_note(f"the end of {log.name}:\n{read_tail(log, 15)}")
        raise
    finally:
        stop(running, grace=15)


def role(name: str, settings: Settings, log: Path) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return process([sys.executable, "-m", "api.roles.serve", name], log, settings.environment())


def engine(settings: Settings, socket: Path, log: Path) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return process([*engine_command(settings, ["--uds", str(socket)]), "--threads", "1"], log)


def alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
