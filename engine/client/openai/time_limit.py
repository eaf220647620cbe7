"""The end of a request, by its timeout or because it is aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from engine.protocol.types import GenerateRequest

_DRAIN_WAIT_SECONDS = 0.001
_DRAIN_SECONDS = 0.25
"""After the end, events that have arrived already are still read, for at most this time."""

_T = TypeVar("_T")


class TimeLimit:
    """The end of a request at its timeout, or as soon as it is aborted."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self.is_aborted = False
        self._deadline = None if request.timeout is None else self._now() + request.timeout
        self._waits: set[asyncio.Timeout] = set()

    @property
    def is_over(self) -> bool:
        return self._deadline is not None and self._now() >= self._deadline

    def abort(self) -> None:
        self.is_aborted = True
        self._deadline = self._now()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(self._deadline)

    async def next(self, items: AsyncGenerator[_T, None]) -> _T | None:
        """Return the next item, ``None`` at the end.

        Raises ``TimeoutError`` at the end of the request's time, once all that has arrived by then is read: the server
        has generated it.
        """
        if self.is_over:
            drain_until = (self._deadline or 0.0) + _DRAIN_SECONDS
            async with asyncio.timeout_at(min(drain_until, self._now() + _DRAIN_WAIT_SECONDS)):
                return await anext(items, None)
        async with asyncio.timeout_at(self._deadline) as wait:
            self._waits.add(wait)
            try:
                return await anext(items, None)
            finally:
                self._waits.discard(wait)

    async def sleep(self, seconds: float) -> bool:
        """Wait. Return False if the request's time is over before."""
        try:
            async with asyncio.timeout_at(self._deadline) as wait:
                self._waits.add(wait)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            return False
        return True

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
