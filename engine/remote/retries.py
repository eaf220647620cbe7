"""Waits between the attempts of a request: to a server that cannot be reached, and to one that has no capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from engine.protocol.types import EngineUnavailable, EngineUnreachable

_CONNECTION_WAITS_SECONDS = (0.1, 0.3, 0.9)
"""Before each further attempt to reach a server."""
_RETRY_ONCE = (0.0,)
"""The same for calls whose answer is soon out of date: one retry, since a pooled connection may be stale."""
_WAITS_SECONDS = (0.25, 0.5, 1.0, 2.0)
"""Before each further attempt without any progress of a request that a server could not serve."""
MAX_WAIT_SECONDS = 10.0
"""The longest wait that a server may ask for (``Retry-After``); for a longer one the job is handed back."""

_T = TypeVar("_T")


class Retries:
    """The attempts of one request. Progress, which is a received token, starts the count again."""

    def __init__(self, waits: tuple[float, ...]) -> None:
        self._waits = waits
        self._count = 0

    @classmethod
    def of_connections(cls, *, should_wait: bool, is_urgent: bool = False) -> Self:
        """Return the attempts to reach a server.

        ``should_wait``: False if a replica can take over, so that one retry is enough. ``is_urgent``: it is at once.
        """
        if is_urgent:
            return cls(_RETRY_ONCE)
        return cls(_CONNECTION_WAITS_SECONDS if should_wait else _CONNECTION_WAITS_SECONDS[:1])

    @classmethod
    def of_requests(cls, *, should_wait: bool) -> Self:
        """Return the attempts of a request to a server that was reached. ``should_wait``: as above."""
        return cls(_WAITS_SECONDS if should_wait else _WAITS_SECONDS[:1])

    def next_wait(self, error: EngineUnavailable | None = None, *, has_progress: bool = False) -> float | None:
        """Return the seconds to wait before the next attempt; ``None`` if the failure is final."""
        if has_progress:
            self._count = 0
        # The connection has had its own retries for a server that cannot be reached.
        if self._count == len(self._waits) or isinstance(error, EngineUnreachable):
            return None
        asked_for = 0.0 if error is None else error.retry_after or 0.0
        wait = max(self._waits[self._count], asked_for)
        self._count += 1
        return wait if wait <= MAX_WAIT_SECONDS else None

    async def call(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return the answer of a call, which is made again after passing failures. Raises the last one."""
        while True:
            try:
                return await call()
            except EngineUnavailable as error:
                wait = self.next_wait(error)
                if wait is None:
                    raise
                await asyncio.sleep(wait)
