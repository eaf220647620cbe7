"""Child processes that end with their parent, and folders private to this user."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from workers.processes.shutdown import call_before_forced_exit, is_forced

_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
# Loaded before any fork: a child between fork and exec must not import or allocate more than it has to.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_running: list[tuple[subprocess.Popen[bytes], signal.Signals]] = []
"""Running children, each with the signal that ends it at a forced exit."""


class StartError(Exception):
    """A process did not start; the message has the end of its log."""


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    death_signal: signal.Signals,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command in a new session, so that Ctrl-C does not reach it. Its output is appended to ``log``, and it
    inherits the file descriptors ``pass_fds``.

    When the calling thread ends for any reason, ``kill -9`` included, the kernel sends ``death_signal`` to the child
    (on Linux only), so call it from a thread that lives as long as the child may.
    """
    with log.open("ab") as output, _defer_signals():
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            start_new_session=True,
            preexec_fn=_die_with_parent(death_signal),
            pass_fds=pass_fds,
        )
        _running[:] = [(process, number) for process, number in _running if process.returncode is None]
        _running.append((child, death_signal))
        return child


def stop(process: subprocess.Popen[bytes], *, grace: float, request: signal.Signals = signal.SIGTERM) -> None:
    """Ask a child to end by a signal; kill it after ``grace`` seconds, or at once when the exit is forced."""
    if process.poll() is None:
        process.send_signal(request)
    if not wait_for_exit(process, timeout=grace):
        process.kill()
        process.wait()


def wait_for_exit(process: subprocess.Popen[bytes], *, timeout: float) -> bool:
    """Wait up to ``timeout`` seconds for a child's exit, or not at all when the exit is forced. Return True if it has
    ended."""
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        if is_forced() or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def make_private_folder(path: Path) -> Path:
    """Create a folder that only this user can enter, or restrict an existing one."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; choose another data_dir")
    path.chmod(0o700)
    return path


def read_tail(log: Path, lines: int = 5, *, since: int = 0) -> str:
    """Return the last non-empty lines of a log behind its first ``since`` bytes."""
    try:
        text = log.read_bytes()[since:].decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


@contextlib.contextmanager
def _defer_signals() -> Iterator[None]:
    """Deliver Ctrl-C, SIGTERM and SIGHUP at the end of the block.

    Around a fork the interpreter calls hooks (``logging`` has some) and drops the exceptions that they raise, so a
    ``KeyboardInterrupt`` raised there would be lost.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for signal_number in received:
        signal.raise_signal(signal_number)


def _die_with_parent(death_signal: signal.Signals) -> Callable[[], None] | None:
    if _LIBC is None:
        return None
    libc, parent, number = _LIBC, os.getpid(), int(death_signal)

    def request_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return request_death_signal


def _end_children() -> None:
    for child, number in list(_running):
        if child.poll() is None:
            child.send_signal(number)


call_before_forced_exit(_end_children)
