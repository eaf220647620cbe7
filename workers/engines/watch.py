"""Waking of the jobs that wait for an engine, as soon as one answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore

CHECK_INTERVAL_SECONDS = 0.25
MIN_WAKE_INTERVAL_SECONDS = 3.0
MAX_WAKE_INTERVAL_SECONDS = 48.0
"""The time between two wake-ups while engines answer but fail all jobs: doubled each time, up to the maximum."""

log = structlog.get_logger("reasoner.engines")


class EngineWatch:
    """Runs in each API process until it is cancelled. Checks the engines only while jobs wait for one."""

    def __init__(
        self,
        store: JobStore,
        is_engine_up: Callable[[], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_engine_up``: probes the engines."""
        self._store = store
        self._is_engine_up = is_engine_up
        self._clock = clock
        self._was_away = False
        self._woke_at = float("-inf")
        self._interval = MIN_WAKE_INTERVAL_SECONDS

    async def run(self) -> None:
        while True:
            try:
                await self.check()
            except BROKER_DOWN:
                pass  # logged by the reaper
            except Exception:
                log.exception("the engines could not be watched")
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)

    async def check(self) -> int:
        """Check once. Return the number of jobs woken."""
        if not await self._store.has_jobs_waiting_for_engine():
            self._was_away, self._interval = False, MIN_WAKE_INTERVAL_SECONDS
            return 0
        if not await self._is_engine_up():
            self._was_away, self._interval = True, MIN_WAKE_INTERVAL_SECONDS
            return 0
        now = self._clock()
        if not self._was_away and now < self._woke_at + self._interval:
            return 0
        if not self._was_away and self._woke_at > float("-inf"):
            self._interval = min(2 * self._interval, MAX_WAKE_INTERVAL_SECONDS)
        self._was_away, self._woke_at = False, now
        woken = await self._store.wake_jobs_waiting_for_engine()
        if woken:
            log.info("an engine answers: jobs go on", jobs=woken)
        return woken
