"""The claims of one worker: those that arrive while the broker answers earlier ones share the next script."""

from __future__ import annotations

import asyncio
import os
import socket

from workers.store.claims import Claim
from workers.store.jobs import JobStore

MAX_CLAIMS = 32
"""Bounds the time for which one script keeps the broker from others."""


class ClaimQueue:
    """Claims jobs for one event loop, with one script at a time."""

    def __init__(self, store: JobStore, *, lease: float, max_attempts: int) -> None:
        """``lease``: seconds after the last sign of life at which a worker counts as lost."""
        self._store = store
        self._lease = lease
        self._max_attempts = max_attempts
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        self._waiting: list[tuple[str, asyncio.Future[Claim | None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def claim(self, job_id: str) -> Claim | None:
        """Claim the job whose turn it is in the queue of ``job_id``; ``None`` if there is nothing to do."""
        claimed: asyncio.Future[Claim | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((job_id, claimed))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await claimed

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_CLAIMS], self._waiting[MAX_CLAIMS:]
                try:
                    claims = await self._store.claim_all(
                        [job_id for job_id, _ in batch],
                        lease=self._lease,
                        max_attempts=self._max_attempts,
                        worker=self._worker,
                        by_turn=True,
                    )
                except Exception as error:
                    for _, claimed in batch:
                        if not claimed.done():
                            claimed.set_exception(error)
                else:
                    for (_, claimed), claim in zip(batch, claims, strict=True):
                        if not claimed.done():  # else its waiter was cancelled, and the lease ends by itself
                            claimed.set_result(claim)
        finally:
            self._sending = None
