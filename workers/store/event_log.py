"""A job's stream: its events for clients, in Redis or in the archive. Events with a key form the journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from reasoner.jobs.events import Event
from reasoner.jobs.job import find_end
from reasoner.jobs.journal import Entry
from workers.archive.errors import ArchiveDown
from workers.store import serialization
from workers.store.broker_errors import BROKER_DOWN
from workers.store.redis_client import BLOCK_SECONDS, RedisClient
from workers.store.serialization import job_key

if TYPE_CHECKING:  # a worker loads no database library
    from workers.archive.archive import Archive

_PAGE_SIZE = 200
_RECONNECT_SECONDS = 0.5


class ShuttingDown(Exception):
    """The process is shutting down and stops waiting for the job, which continues."""


class EventLog(RedisClient):
    """Reads the streams of jobs."""

    def __init__(self, url: str, *, retry_seconds: float = 0.0, archive: Archive | None = None) -> None:
        """``archive``: of the jobs that are no longer in Redis; a worker, whose jobs have not ended, needs none."""
        super().__init__(url, retry_seconds=retry_seconds)
        self.archive = archive
        self._closing = asyncio.Event()

    async def close(self) -> None:
        await super().close()
        if self.archive is not None:
            await self.archive.close()

    def end_waits(self) -> None:
        """End every wait for a job because this process is about to end. Events that have arrived are still yielded."""
        self._closing.set()

    async def load_events(self, job_id: str, after: int = 0) -> list[Event]:
        """Return the events behind number ``after`` that the stream holds now."""
        rows = await self._read_all(job_id, after)
        # A stream that was moved to the archive meanwhile may have been cut off.
        if self.archive is not None and not await self.command("EXISTS", job_key(job_id)):
            rows = await self._read_archived(job_id, after)
        return [serialization.event(entry_id, fields) for entry_id, fields in rows]

    async def load_entries(self, job_id: str) -> list[Entry]:
        """Return the journal."""
        return [serialization.entry(fields) for _, fields in await self._read_all(job_id, 0) if "key" in fields]

    async def follow(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events behind number ``after`` as they come, up to the terminal one. Outlasts an absent broker.

        Ends early when the job is deleted. A terminal event behind which a retried job went on is one among others.
        Raises ``ShuttingDown`` after ``end_waits``.
        """
        has_ended = False
        while True:
            try:
                rows = await self._read_page(job_id, after)
                if not rows:
                    if has_ended:
                        return
                    if await self.command("EXISTS", job_key(job_id)):
                        rows = await self._await_events(job_id, after)
                    elif not (rows := await self._read_archived(job_id, after)):
                        return
            except (ArchiveDown, *BROKER_DOWN):
                await self._wait_for_broker()
                rows = []
            for entry_id, fields in rows:
                event = serialization.event(entry_id, fields)
                after = event.seq
                has_ended = find_end(event.type) is not None
                yield event
            if self._closing.is_set() and not has_ended:
                raise ShuttingDown(job_id)

    async def _wait_for_broker(self) -> None:
        """Wait before the next attempt at an absent broker; not when this process is about to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RECONNECT_SECONDS):
                await self._closing.wait()

    async def _read_all(self, job_id: str, after: int) -> list[Any]:
        rows: list[Any] = []
        while True:
            page = await self._read_page(job_id, after)
            rows += page
            if len(page) < _PAGE_SIZE:
                return rows
            after = int(page[-1][0].removesuffix("-0"))

    async def _read_archived(self, job_id: str, after: int) -> list[Any]:
        rows = None if self.archive is None else await self.archive.load_entries(job_id)
        return [row for row in rows or () if int(row[0].removesuffix("-0")) > after]

    async def _read_page(self, job_id: str, after: int) -> list[Any]:
        """Read a part of the stream: reading all of a long one takes longer than a command may."""
        log, start = f"{job_key(job_id)}:log", f"({after}-0"
        page: list[Any] = await self.command("XRANGE", log, start, "+", "COUNT", _PAGE_SIZE)
        return page

    async def _await_events(self, job_id: str, after: int) -> list[Any]:
        block_ms = round(BLOCK_SECONDS * 1000)
        log = f"{job_key(job_id)}:log"
        reading = self.start_blocking("XREAD", "COUNT", _PAGE_SIZE, "BLOCK", block_ms, "STREAMS", log, f"{after}-0")
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        streams = reading.result() if reading.done() else None
        return list(streams[0][1]) if streams else []
