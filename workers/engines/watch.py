"""Wakes the jobs that wait for an engine as soon as one answers, in place of after a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from workers.store.jobs import JobStore
from workers.store.redis_client import BROKER_DOWN

TICK_SECONDS = 0.25
REST_SECONDS = 3.0
"""An engine that answers and fails every job does not get them back more often than this."""

log = structlog.get_logger("reasoner.engines")


class EngineWatch:
    """Runs in every API process until it is cancelled. The engines are asked while jobs wait for one, and only then."""

    def __init__(
        self,
        store: JobStore,
        answers: Callable[[], Awaitable[bool]],
        on_wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``answers`` asks whether jobs find an engine; ``on_wake`` is told that jobs have become due."""
        self._store = store
        self._answers = answers
        self._on_wake = on_wake
        self._clock = clock
        self._was_away = False
        self._woke_at = float("-inf")

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except BROKER_DOWN:
                pass  # the reaper says so
            except Exception:
                log.exception("the engines could not be watched")
            await asyncio.sleep(TICK_SECONDS)

    async def look(self) -> int:
        """Look once; return how many jobs it woke."""
        if not await self._store.has_jobs_waiting_for_engine():
            self._was_away = False
            return 0
        if not await self._answers():
            self._was_away = True
            return 0
        now = self._clock()
        if not self._was_away and now < self._woke_at + REST_SECONDS:
            return 0
        self._was_away, self._woke_at = False, now
        woken = await self._store.wake_jobs_waiting_for_engine()
        if woken:
            log.info("an engine answers: jobs go on", jobs=woken)
            self._on_wake()
        return woken
