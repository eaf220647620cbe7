"""Open files: the limit of a process, and a server that has reached it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from typing import Any

import structlog

QUIET_SECONDS = 60.0
"""The time without an error after which the next one is logged again."""
_ACCEPT_FAILED = "socket.accept() out of system resource"
"""The message of asyncio, which tries again after a second."""

log = structlog.get_logger("reasoner.api")


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard one, for this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse what they say is the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class AcceptErrorHandler:
    """An event loop's exception handler that logs connections that cannot be accepted once, not every second."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != _ACCEPT_FAILED:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._last > QUIET_SECONDS:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            log.error("connections are not accepted", reason=str(context.get("exception")), file_limit=limit)
        self._last = now
