"""The archiver: moves jobs that have ended from Redis to the archive, and deletes old ones there.

It runs in each API process, of which one moves jobs at a time. A pass marks jobs in Redis, reads them, stores them in
one transaction of the archive, and then removes those from Redis that have not changed since. Wherever it is cut off,
each job is in Redis or in both: the marks stay, and the next pass decides by what Redis has. So a job that was deleted
or retried meanwhile does not stay in the archive either. Passes are numbered, and the archive's transaction refuses one
that comes after a later one, as of a process that was halted for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import TYPE_CHECKING, Final

import structlog

from reasoner.jobs.job import TERMINAL_STATUSES
from workers.archive.errors import ArchiveDown
from workers.archive.record import JobRecord
from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore

if TYPE_CHECKING:  # a service without an archive loads no database library
    from workers.archive.archive import Archive

INTERVAL_SECONDS: Final = 1.0
OUTAGE_SECONDS: Final = 5.0
"""The interval while the archive is away."""
MAX_JOBS: Final = 250
"""Jobs of one pass."""
_READ_AT_ONCE: Final = 25
_MAX_CHARS: Final = 16 << 20
"""Characters of journals after which a pass reads no further job."""
_TERM_SECONDS: Final = 5.0
"""Another process may begin a pass so long after one began that has not ended: its process may have been killed."""

log = structlog.get_logger("reasoner.archiver")


class Archiver:
    """Moves jobs in an interval until ``stop``."""

    def __init__(self, store: JobStore, archive: Archive, *, age: float, retention: float) -> None:
        """``age``: seconds after its end at which a job is moved. ``retention``: those after which it is deleted."""
        self._store = store
        self._archive = archive
        self._age = age
        self._retention = retention
        self._holder = uuid.uuid4().hex
        self._stopping = asyncio.Event()
        self._is_counter_checked = False
        self._unusable: set[str] = set()
        """Jobs that cannot be archived, which were logged."""
        self.outage = ""
        """The reason why the archive cannot be used; empty while it can."""

    def stop(self) -> None:
        """End ``run`` after the present pass."""
        self._stopping.set()

    async def run(self) -> None:
        while not self._stopping.is_set():
            pause = await self._move_and_report()
            if pause:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._stopping.wait()

    async def _move_and_report(self) -> float:
        """Run a pass. Log what prevents it instead of raising it. Return the pause before the next one."""
        try:
            count = await self.move()
        except ArchiveDown as error:
            if self.outage != error.reason:
                log.error("archive unavailable: ended jobs stay in Redis", reason=error.reason)
            self.outage = error.reason
            return OUTAGE_SECONDS
        except BROKER_DOWN:  # logged by the reaper
            return INTERVAL_SECONDS
        except Exception:
            log.exception("ended jobs could not be moved to the archive")
            return OUTAGE_SECONDS
        if self.outage:
            log.info("archive available again")
        self.outage = ""
        return 0.0 if count >= MAX_JOBS else INTERVAL_SECONDS

    async def move(self) -> int:
        """Run a pass. Return the number of jobs that it took on: none while another process moves jobs."""
        if not self._is_counter_checked:
            # Redis that lost its data would otherwise give new jobs the positions of archived ones.
            await self._store.script("archive_renumber", await self._archive.find_last_position())
            self._is_counter_checked = True
        claimed = await self._store.claim_for_archive(self._holder, _TERM_SECONDS, self._age, MAX_JOBS)
        if claimed is None:
            await self._archive.check()
            return 0
        number, ids = claimed
        if ids:
            await self._move_jobs(number, ids)
        return max(len(ids), await self._delete_expired())

    async def _move_jobs(self, number: str, ids: list[str]) -> None:
        records: list[JobRecord] = []
        stale: list[str] = []
        for start in range(0, len(ids), _READ_AT_ONCE):
            some = ids[start : start + _READ_AT_ONCE]
            for job_id, record in zip(some, await asyncio.gather(*map(self._store.read_record, some)), strict=True):
                if record is None or record.fields["status"] not in TERMINAL_STATUSES:
                    stale.append(job_id)
                else:
                    records.append(record)
            if sum(record.num_chars for record in records) > _MAX_CHARS:
                break
        records = await asyncio.to_thread(lambda: [record for record in records if self._is_storable(record)])
        if await self._archive.save(records, stale, number=int(number)):
            await self._store.settle_archived(number, records, stale)

    def _is_storable(self, record: JobRecord) -> bool:
        """Return False for a job whose row cannot be made, as after a change by hand: it must not keep the others."""
        try:
            record.prepare()
        except (KeyError, TypeError, ValueError) as error:
            if record.id not in self._unusable:
                self._unusable.add(record.id)
                log.error("job cannot be archived: it stays in Redis", job=record.id, error=repr(error))
            return False
        return True

    async def _delete_expired(self) -> int:
        """Delete some of the jobs that ended longer ago than the retention time. Return their number."""
        now = await self._store.get_broker_time()
        expired = await self._archive.list_expired(round((now - self._retention) * 1000), MAX_JOBS)
        await self._store.delete_archived(expired)
        return len(expired)
