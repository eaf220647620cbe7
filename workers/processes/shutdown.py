"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first one ends a command in order, a second Ctrl-C at once.

The first raises ``KeyboardInterrupt`` (or ``SystemExit``) in the main thread, and context managers close what is open.
After that nothing is raised, so that no cleanup is interrupted. A second Ctrl-C makes waits in the cleanup return at
once (``is_forced``) and a moment later ends the process. A second signal of another kind does nothing: service managers
that stop a process group, and closing terminals, send them twice.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORCE_SECONDS = 1.0
"""The time between the second Ctrl-C and the end of the process."""
RERAISE_SECONDS = 0.01
"""The delay before a dropped exception is raised again."""
_SHOW_CURSOR = b"\x1b[?25h"

_T = TypeVar("_T")


class _Received:
    """State of the signal handlers. Without locks, since a handler may interrupt the thread that holds one."""

    def __init__(self) -> None:
        self.is_handled = False
        """True while the handlers of this module are installed."""
        self.first: int | None = None
        self.is_forced = False
        self.shields = 0
        self.earlier_hook = sys.unraisablehook
        """The hook for dropped exceptions that are not from this module."""
        self.cancel: Callable[[], object] | None = None
        """Cancels the coroutine that the main thread runs."""


_received = _Received()
_exit_callbacks: list[Callable[[], object]] = []


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Install the handlers for the block. Has no effect inside of another such block, or outside of the main thread.

    After a first signal the handlers stay, since the process is ending. Ignored signals (``nohup``) stay ignored.
    """
    if _received.is_handled or not _in_main_thread():
        yield
        return
    earlier = _install()
    try:
        yield
    finally:
        if _received.first is None:
            _received.is_handled = False
            for number, handler in earlier.items():
                signal.signal(number, handler)
            sys.unraisablehook = _received.earlier_hook


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer a first signal to the end of the block, which starts or stops children."""
    if not _in_main_thread():
        yield
        return
    before = _received.first
    _received.shields += 1
    try:
        yield
    finally:
        _received.shields -= 1
    if _received.first is not None and before is None and not _received.shields:
        _raise_exit(_received.first)


def is_forced() -> bool:
    """Return True after a second Ctrl-C: cleanup must not wait any longer."""
    return _received.is_forced


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine as ``asyncio.run`` does; the first signal cancels it and takes effect when it has ended."""

    async def cancellable() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        _received.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await main
        finally:
            _received.cancel = None

    before = _received.first
    try:
        result = asyncio.run(cancellable())
    except asyncio.CancelledError:
        if _received.first == before:
            raise
    else:
        if _received.first == before:
            return result
    assert _received.first is not None
    _raise_exit(_received.first)


def treat_as_first_signal(number: int) -> None:
    """Record a signal that another handler received as the first one, and handle those that follow."""
    _install()
    _receive_first(number)


def call_before_forced_exit(callback: Callable[[], object]) -> None:
    """Register a callback for a forced exit. It must not block."""
    _exit_callbacks.append(callback)


def _install() -> dict[signal.Signals, Any]:
    _received.is_handled = True
    if sys.unraisablehook is not _on_dropped:
        _received.earlier_hook, sys.unraisablehook = sys.unraisablehook, _on_dropped
    return {
        number: signal.signal(number, _on_signal)
        for number in SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN  # under nohup, the process outlives its terminal
    }


def _on_signal(number: int, _: FrameType | None) -> None:
    if _received.first is None:
        _receive_first(number)
        if _received.cancel is not None:
            _received.cancel()
        elif not _received.shields:
            _raise_exit(number)
    elif number == signal.SIGINT and not _received.is_forced:
        _received.is_forced = True
        signal.signal(signal.SIGALRM, _force)
        signal.setitimer(signal.ITIMER_REAL, FORCE_SECONDS)


def _receive_first(number: int) -> None:
    _received.first = number
    atexit.register(_ignore_more)


def _on_dropped(dropped: sys.UnraisableHookArgs) -> None:
    """Raise an exception again that the interpreter dropped, for example because it was raised in a finalizer."""
    number = _received.first
    if number is None or not issubclass(dropped.exc_type, (KeyboardInterrupt, SystemExit)):
        _received.earlier_hook(dropped)
        return
    _received.first = None
    signal.signal(signal.SIGALRM, lambda _, frame: _on_signal(number, frame))
    signal.setitimer(signal.ITIMER_REAL, RERAISE_SECONDS)


def _ignore_more() -> None:
    """Ignore signals at exit: the interpreter removes its handlers next, and a signal would kill the process."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _raise_exit(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _force(*_: object) -> None:
    """End the process now. Its temporary folders are removed by processes that outlive it."""
    for callback in _exit_callbacks:
        callback()
    if sys.stderr.isatty():  # a progress display hides it
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(128 + (_received.first or signal.SIGINT))


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
