"""The leases of all jobs that one process runs, renewed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from workers.store.broker_errors import BROKER_DOWN
from workers.store.claims import Claim
from workers.store.jobs import JobStore

HEARTBEATS_PER_LEASE = 6
"""More than the lease needs, since a heartbeat also detects a cancellation."""
_CLAIMS_PER_SCRIPT = 100
"""Bounds the time for which one script keeps the broker from others."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldLease:
    """A lease that is renewed."""

    claim: Claim
    cancelled: asyncio.Event
    """Set when the client cancels the job."""
    lost: asyncio.Event
    """Set when another worker has the job, or it has ended."""


class Leases:
    """Renews the leases of an event loop's jobs by one script for many. Runs only while there are any."""

    def __init__(self, store: JobStore, lease: float) -> None:
        """``lease``: the time in seconds after the last sign of life at which a worker counts as lost."""
        self.lease = lease
        self._store = store
        self._held: set[HeldLease] = set()
        self._renewal: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def keep(self, claim: Claim) -> AsyncIterator[HeldLease]:
        """Renew the lease of a claim within the block."""
        held = HeldLease(claim, asyncio.Event(), asyncio.Event())
        self._held.add(held)
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())
        try:
            yield held
        finally:
            self._held.discard(held)
            if not self._held and self._renewal is not None:
                renewal, self._renewal = self._renewal, None
                renewal.cancel()
                await asyncio.wait({renewal})

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.lease / HEARTBEATS_PER_LEASE)
            held = [each for each in self._held if not each.lost.is_set()]
            for start in range(0, len(held), _CLAIMS_PER_SCRIPT):
                await self._renew_some(held[start : start + _CLAIMS_PER_SCRIPT])

    async def _renew_some(self, held: list[HeldLease]) -> None:
        try:
            states = await self._store.heartbeat([each.claim for each in held])
        except BROKER_DOWN:
            return  # the searches fail by themselves when they cannot write
        for each, state in zip(held, states, strict=True):
            if state == "lost":
                each.lost.set()
            elif state == "cancel":
                each.cancelled.set()
