"""Generate requests in flight on servers of others: their end, and the failures of single branches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from engine.protocol.streams import merge_streams
from engine.protocol.types import (
    Completion,
    EngineError,
    EngineUnavailable,
    Events,
    FinishReason,
    GenerateRequest,
)
from engine.remote.retries import Retries

_DRAIN_WAIT_SECONDS = 0.001
_DRAIN_SECONDS = 0.25
"""After the end, events that have arrived already are still read, for at most this time."""

_T = TypeVar("_T")


class RunningRequest:
    """A generate request, which ends at its timeout, when it is aborted, or when a branch fails for good."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.failure: EngineError | None = None
        """The first failure of a branch that no retry has mended."""
        self.refusal: EngineError | None = None
        """The first refusal of a branch."""
        self._is_aborted = False
        self._deadline = None if request.timeout is None else _read_clock() + request.timeout
        self._waits: set[asyncio.Timeout] = set()

    @property
    def is_over(self) -> bool:
        return self._deadline is not None and _read_clock() >= self._deadline

    @property
    def end_reason(self) -> FinishReason:
        """The reason with which a branch ends that its server has not ended."""
        if self.failure is not None:
            return "length"
        return "cancelled" if self._is_aborted else "timeout"

    def abort(self) -> None:
        """End all branches with what they have received."""
        self._is_aborted = True
        self._end()

    def fail(self, error: EngineError) -> None:
        """Record the failure of a branch. A permanent one ends the others, which would meet the same."""
        self.failure = self.failure or error
        if not isinstance(error, EngineUnavailable):
            self._end()

    def refuse(self, error: EngineError) -> None:
        """Record that the server refuses a branch for good, of which the others may know nothing."""
        self.refusal = self.refusal or error

    async def wait_to_retry(self, error: EngineUnavailable, retries: Retries, *, has_progress: bool) -> bool:
        """Wait before the next attempt of a branch. Return False if there is none, since it has failed or time is
        over.
        """
        seconds = retries.next_wait(error, has_progress=has_progress)
        if seconds is None:
            self.fail(error)
            return False
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

    async def next(self, items: AsyncGenerator[_T, None]) -> _T | None:
        """Return the next item, ``None`` at the end.

        Raises ``TimeoutError`` at the end of the request's time, once all that has arrived by then is read: the server
        has generated it.
        """
        if self.is_over:
            drain_until = (self._deadline or 0.0) + _DRAIN_SECONDS
            async with asyncio.timeout_at(min(drain_until, _read_clock() + _DRAIN_WAIT_SECONDS)):
                return await anext(items, None)
        async with asyncio.timeout_at(self._deadline) as wait:
            self._waits.add(wait)
            try:
                return await anext(items, None)
            finally:
                self._waits.discard(wait)

    def _end(self) -> None:
        self._deadline = _read_clock() if self._deadline is None else min(self._deadline, _read_clock())
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(self._deadline)


class RunningRequests:
    """The generate requests of one client."""

    def __init__(self) -> None:
        self._running: list[RunningRequest] = []

    async def generate(
        self, request: GenerateRequest, streams: Callable[[RunningRequest], Sequence[Events]], *, stream: bool
    ) -> Events:
        """Yield the events of the streams of a request's branches; without ``stream`` only completions.

        Raises the first failure after everything that did arrive, and the first refusal if the server refuses all
        branches before it has sent a token; otherwise refused branches come last.
        """
        running = RunningRequest(request)
        self._running.append(running)
        refused: list[Completion] = []
        has_arrived = False
        try:
            async with aclosing(merge_streams(streams(running), 0)) as events:
                async for event in events:
                    if isinstance(event, Completion) and event.finish_reason == "refused":
                        refused.append(event)
                        has_arrived |= bool(event.token_ids)
                    elif stream or isinstance(event, Completion):
                        has_arrived = True
                        yield event
        finally:
            self._running.remove(running)
        if running.refusal is not None and not has_arrived:
            raise running.failure or running.refusal
        for completion in refused:
            yield completion
        if running.failure is not None:
            raise running.failure

    def abort(self, request_id: str) -> None:
        """End the branches of a request with what they have received."""
        for running in self._running:
            if running.request.request_id == request_id:
                running.abort()


def _read_clock() -> float:
    return asyncio.get_running_loop().time()
