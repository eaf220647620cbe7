"""Child processes that never outlive their parent, and folders that only their owner can enter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from workers.processes.shutdown import call_before_forced_exit, is_forced

_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
# Loaded before any fork: a child between fork and exec must not import or allocate more than it has to.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_running: list[tuple[subprocess.Popen[bytes], signal.Signals]] = []
"""Children that nobody has stopped, with what ends them when this process has no time to."""


class StartError(Exception):
    """A process did not start; the message has its last words."""


def spawn(
    command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, death_signal: signal.Signals
) -> subprocess.Popen[bytes]:
    """Starts a command with its output appended to ``log``, away from the terminal's Ctrl-C.

    When the thread that calls this ends for whatever reason, ``kill -9`` included, the kernel sends ``death_signal``
    (on Linux; elsewhere only ``stop`` ends a child): call it from a thread that lives as long as the child may.
    """
    with log.open("ab") as output, _signals_later():
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
            preexec_fn=_die_with_parent(death_signal),
        )
        _running[:] = [(each, number) for each, number in _running if each.returncode is None]
        _running.append((child, death_signal))
        return child


def stop(process: subprocess.Popen[bytes], *, grace: float) -> None:
    """Ask a child to end, and kill it when it has not after ``grace`` seconds, or at once when there is no time."""
    if process.poll() is None:
        process.terminate()
    if not ended(process, within=grace):
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[bytes], *, within: float) -> bool:
    """Wait for a child's end, for so many seconds at most; not at all once a second Ctrl-C wants us gone."""
    deadline = time.monotonic() + within
    while process.poll() is None:
        if is_forced() or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def make_private_folder(path: Path) -> Path:
    """Makes a folder that only this user can enter, or makes sure that an existing one is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to somebody else")
    path.chmod(0o700)
    return path


def tail(log: Path, lines: int = 5, *, since: int = 0) -> str:
    """The last lines of a log that say something, of what was written behind its first ``since`` bytes."""
    try:
        text = log.read_bytes()[since:].decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block.

    Around a fork the interpreter calls hooks (``logging`` has some) and drops what they raise: a ``KeyboardInterrupt``
    that happened to rise there would be lost, and with it the user's Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for arrived in came:
        signal.raise_signal(arrived)


def _die_with_parent(death_signal: signal.Signals) -> Callable[[], None] | None:
    if _LIBC is None:
        return None
    libc, parent, number = _LIBC, os.getpid(), int(death_signal)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask


def _end_children() -> None:
    for child, number in list(_running):
        if child.poll() is None:
            child.send_signal(number)


call_before_forced_exit(_end_children)
