"""The reaper: sends the wake-ups that are missing and deletes expired jobs and files.

It runs in each API process. A job that becomes ready sends its wake-up in the same script. The reaper sends those of
jobs whose delay is over or whose worker died, and replaces lost ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import structlog

from workers.config.rate_limits import Share
from workers.store.broker_errors import BROKER_DOWN, describe_eviction, describe_outage
from workers.store.files import FileStore
from workers.store.jobs import JobStore
from workers.store.reaping import WakeupTemplates

SWEEP_INTERVAL_SECONDS = 0.5
CLEANUP_INTERVAL_SECONDS = 600.0
"""Interval at which bytes that no file has are looked for."""

log = structlog.get_logger("reasoner.reaper")


class Reaper:
    """Sweeps in an interval until ``stop``."""

    def __init__(
        self,
        store: JobStore,
        files: FileStore,
        templates: WakeupTemplates,
        *,
        max_attempts: int,
        retention: float,
        get_shares: Callable[[], Mapping[str, Share]] = lambda: {"": Share()},
    ) -> None:
        """``templates``: of the messages. ``retention``: seconds for which an ended job is kept. ``get_shares``:
        returns those of owners, that of all others with the empty name.
        """
        self._store = store
        self._files = files
        self._templates = templates
        self._max_attempts = max_attempts
        self._retention = retention
        self._get_shares = get_shares
        self._outage = ""
        self._is_policy_checked = False
        self._stopping = asyncio.Event()
        self._cleaned_up_at = float("-inf")

    def stop(self) -> None:
        """End ``run`` after the present sweep, so that no job is left between its claim and its wake-up."""
        self._stopping.set()

    async def run(self) -> None:
        while not self._stopping.is_set():
            await self.sweep_and_report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_INTERVAL_SECONDS):
                    await self._stopping.wait()

    async def sweep_and_report(self) -> None:
        """Sweep once. Log what prevents it instead of raising it, since jobs depend on further sweeps."""
        try:
            await self.sweep()
            await self._check_policy()
        except BROKER_DOWN as error:
            self._log_outage(describe_outage(error))
        except Exception:
            log.exception("sweep failed")
        else:
            self._log_outage("")

    async def sweep(self) -> int:
        """Send the wake-ups that are missing, and delete what has expired. Return the number of wake-ups."""
        due = await self._store.reap(self._max_attempts, self._templates, self._get_shares())
        await self._store.expire(self._retention)
        await self._files.expire()
        now = time.monotonic()
        if now - self._cleaned_up_at > CLEANUP_INTERVAL_SECONDS:
            self._cleaned_up_at = now
            await self._files.remove_leftovers()
        return len(due)

    def _log_outage(self, outage: str) -> None:
        """Log what is wrong with the broker when that changes."""
        if outage and outage != self._outage:
            log.warning("broker unavailable", reason=outage)
        elif self._outage and not outage:
            log.info("broker available again")
        self._outage = outage

    async def _check_policy(self) -> None:
        """Name an evicting broker in the log, once."""
        if not self._is_policy_checked:
            self._is_policy_checked = True
            if warning := describe_eviction(await self._store.get_eviction_policy()):
                log.warning(warning)
