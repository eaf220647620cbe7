"""Limit of the time that a chat template takes: it is a program, which may loop forever for certain messages."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SECONDS = 1.0
"""Processor time of a rendering, hundreds of times of what templates take."""
_FILE = "<template>"
"""jinja2's file name of compiled templates."""


@contextmanager
def limit_rendering() -> Iterator[None]:
    """Raise ``TimeoutError`` in a template that this thread renders for too long.

    The time is looked at on every line of the template, so a single operation, such as a huge power, is not stopped.
    """
    end, before = time.thread_time() + _SECONDS, sys.gettrace()

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename != _FILE:
            return None
        if time.thread_time() > end:
            raise TimeoutError(f"it takes more than {_SECONDS:g} second of processor time")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
