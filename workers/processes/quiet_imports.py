"""Ctrl-C while modules are imported, when nothing is open yet."""

from __future__ import annotations

import contextlib
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
        yield
        return
    earlier = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
