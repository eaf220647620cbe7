"""Ctrl-C, SIGTERM and SIGHUP of a command: the first one ends it in order, a second Ctrl-C at once.

The first raises ``KeyboardInterrupt`` (or ``SystemExit``) in the main thread, and whatever is open is closed on the way
out. From then on nothing is raised any more, so that no cleanup is cut off in its middle. A Ctrl-C that comes then
takes the patience away from the cleanup, and a moment later ends the process wherever it is. The other signals do not:
a service manager that ends a group of processes, and a terminal that closes, send them twice.
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
"""From the second Ctrl-C to the end of the process."""
AGAIN_SECONDS = 0.01
"""From an exception that was dropped to the next try."""
_SHOW_CURSOR = b"\x1b[?25h"

_T = TypeVar("_T")


class _Received:
    """Signals that came. No locks: a handler runs between any two instructions of the thread that would hold one."""

    def __init__(self) -> None:
        self.is_handled = False
        """True while the handlers are those of this module."""
        self.first: int | None = None
        self.is_forced = False
        self.shields = 0
        self.earlier_hook = sys.unraisablehook
        """Told of exceptions that are dropped and are none of ours."""
        self.cancel: Callable[[], object] | None = None
        """Ends the coroutine that the main thread runs."""


_received = _Received()
_last_acts: list[Callable[[], object]] = []


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handle the signals of this process in the block; nothing changes inside another such block, or in a thread.

    After a first signal the handlers stay: the process is on its way out. One that is ignored (``nohup``) stays so.
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
    """Hold a first signal back until the end of a block that stops what was started."""
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
        _leave(_received.first)


def is_forced() -> bool:
    """Return whether a second Ctrl-C has come: what ends in order takes too long."""
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
    _leave(_received.first)


def treat_as_first_signal(number: int) -> None:
    """Count a signal that somebody else's handler got as the first one, and handle those that follow."""
    _install()
    _receive_first(number)


def call_before_forced_exit(act: Callable[[], object]) -> None:
    """Have something done before a forced end: it must not wait for anything."""
    _last_acts.append(act)


def _install() -> dict[signal.Signals, Any]:
    _received.is_handled = True
    if sys.unraisablehook is not _on_dropped:
        _received.earlier_hook, sys.unraisablehook = sys.unraisablehook, _on_dropped
    return {
        number: signal.signal(number, _on_signal)
        for number in SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN  # under nohup it is to outlive its terminal
    }


def _on_signal(number: int, _: FrameType | None) -> None:
    if _received.first is None:
        _receive_first(number)
        if _received.cancel is not None:
            _received.cancel()
        elif not _received.shields:
            _leave(number)
    elif number == signal.SIGINT and not _received.is_forced:
        _received.is_forced = True
        signal.signal(signal.SIGALRM, _force)
        signal.setitimer(signal.ITIMER_REAL, FORCE_SECONDS)


def _receive_first(number: int) -> None:
    _received.first = number
    atexit.register(_ignore_more)


def _on_dropped(dropped: sys.UnraisableHookArgs) -> None:
    """Try again a moment later what the interpreter dropped: while an object ends, for one, nothing can be raised."""
    number = _received.first
    if number is None or not issubclass(dropped.exc_type, (KeyboardInterrupt, SystemExit)):
        _received.earlier_hook(dropped)
        return
    _received.first = None
    signal.signal(signal.SIGALRM, lambda _, frame: _on_signal(number, frame))
    signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)


def _ignore_more() -> None:
    """Behind this the interpreter takes its handlers away, and any signal would kill what is all but gone."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _leave(number: int) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _force(*_: object) -> None:
    """End the process now. What its folders hold is cleared away by those who outlive it."""
    for act in _last_acts:
        act()
    if sys.stderr.isatty():  # a progress display hides it
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(128 + (_received.first or signal.SIGINT))


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
