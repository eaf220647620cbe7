"""The outbox and the rescue service: sends the wake-up of every job that needs one, and clears old ones away.

It runs in every API process and is the only sender of messages. A job that was just recorded, one whose message got
lost and one whose worker died are the same case: their time in ``reasoner:due`` has come.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from workers.broker.wakeups import send_wakeup
from workers.store.jobs import JobStore
from workers.store.redis_client import BROKER_DOWN

TICK_SECONDS = 0.5

log = structlog.get_logger("reasoner.reaper")


class Reaper:
    """Runs until ``stop``. ``nudge`` makes it look at once, for a job that was just recorded."""

    def __init__(self, store: JobStore, app: Celery, *, max_attempts: int, retention: float) -> None:
        """``retention``: seconds that an ended job is kept."""
        self._store = store
        self._app = app
        self._max_attempts = max_attempts
        self._retention = retention
        self._nudged = asyncio.Event()
        self._stopping = False

    def nudge(self) -> None:
        self._nudged.set()

    def stop(self) -> None:
        """Ends ``run`` after its sweep: between taking a job on and sending its wake-up is no place to be cut off."""
        self._stopping = True
        self._nudged.set()

    async def run(self) -> None:
        while not self._stopping:
            try:
                await self.sweep()
            except (*BROKER_DOWN, OperationalError) as error:
                log.warning("broker unreachable", error=type(error).__name__)
            except Exception:
                # Jobs wait for this loop: whatever went wrong, the next sweep tries again.
                log.exception("sweep failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._nudged.wait()
            if not self._stopping:
                self._nudged.clear()

    async def sweep(self) -> int:
        """Looks once; answers how many wake-ups it sent."""
        wake = await self._store.reap(self._max_attempts)
        for job_id, queue in wake:
            await asyncio.to_thread(send_wakeup, self._app, job_id, queue)
        await self._store.expire(self._retention)
        return len(wake)
