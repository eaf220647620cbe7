"""Imports of a command: Ctrl-C while nothing is open yet, and no garbage collection."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator

INTERRUPTED = 128 + signal.SIGINT


@contextlib.contextmanager
def end_quietly() -> Iterator[None]:
    """End the process by Ctrl-C with status 130, at once and without a traceback, while the block imports modules.

    An exception would not do: several libraries turn one that is raised in their import into another error.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a shell
        with collect_no_garbage():
            yield
        return
    earlier = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        with collect_no_garbage():
            yield
    finally:
        signal.signal(signal.SIGINT, earlier)


@contextlib.contextmanager
def collect_no_garbage() -> Iterator[None]:
    """Collect no garbage while the block imports modules: they stay alive, and to traverse them again and again took a
    seventh of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
