"""Reading jobs wherever they are: in Redis, or in the archive of jobs that have ended.

A job that is being moved, or brought back, is in both for a moment; then Redis has the truth. So Redis is read first,
and what the archive has is checked against it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass

from workers.archive.errors import ArchiveDown
from workers.archive.filters import JobFacts, JobFilter
from workers.archive.record import JobRecord
from workers.store import serialization
from workers.store.event_log import EventLog
from workers.store.request_origin import Origin
from workers.store.serialization import JobDocument, job_key

_PAGE_SIZE = 100
_End = tuple[int, str]
"""The time (ms) of a job's end, and its id: they sort as lists of ends are sorted."""
MAX_SCANNED = 5_000
"""The number of jobs in Redis among which one page looks for those that its filter wants."""


class NoSuchJob(Exception):
    """There is no job with this id."""


@dataclass(frozen=True, slots=True)
class JobListing:
    """A page of jobs, newest first."""

    jobs: list[JobDocument]
    has_more: bool
    cursor: str | None
    """The id of the job behind which the next page begins; not on this page if many were looked at in vain."""
    outage: str | None = None
    """The reason why jobs of the archive are missing."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """The jobs of Redis that a filter wants, by position; the position and id of the last one that was looked at."""

    found: dict[int, dict[str, str]]
    floor: tuple[int, str] | None = None
    """``None`` if all were looked at."""


class JobHistory(EventLog):
    """The reading operations of clients."""

    async def check_owner(self, job_id: str, owner: str | None) -> None:
        """Raise ``NoSuchJob`` for a job of another owner; ``None`` may see the jobs of all owners.

        The other methods trust the id of a job: check each id that comes from a client here first. An owner never
        changes, so the check stays valid.
        """
        if owner is not None and await self.get_owner(job_id) != owner:
            raise NoSuchJob(job_id)

    async def get(self, job_id: str) -> JobDocument:
        """Return the job. Raises ``NoSuchJob``."""
        return serialization.document(await self._load_fields(job_id))

    async def get_form(self, job_id: str) -> str | None:
        """Return the ``form`` given to ``submit``; ``None`` if there was none, or there is no such job."""
        try:
            _, form = await self._load_some(job_id, "form")
        except NoSuchJob:
            return None
        return form

    async def get_owner(self, job_id: str) -> str:
        """Return the owner of a job. Raises ``NoSuchJob``."""
        _, owner = await self._load_some(job_id, "owner")
        return str(owner)

    async def get_origin(self, job_id: str) -> Origin:
        """Return the origin of a job; an empty one if there is no such job."""
        try:
            _, origin = await self._load_some(job_id, "origin")
        except NoSuchJob:
            origin = None
        return Origin.from_json(origin or "{}")

    async def load_archived(self, ids: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the hashes of those jobs that the archive has, by id."""
        return await self.archive.load_fields(ids) if self.archive is not None and ids else {}

    async def read_record(self, job_id: str) -> JobRecord | None:
        """Return a job of Redis in the archive's form; ``None`` if it is not there."""
        fields = await self.command("HGETALL", job_key(job_id))
        return JobRecord(fields, await self._read_all(job_id, 0)) if fields else None

    async def _load_fields(self, job_id: str) -> dict[str, str]:
        """Return a job's hash. Raises ``NoSuchJob``."""
        fields: dict[str, str] = await self.command("HGETALL", job_key(job_id))
        if not fields and self.archive is not None:
            archived = (await self.load_archived([job_id])).get(job_id, {})
            # It may have been brought back meanwhile, or deleted while it was moved.
            fields = (await self._find_present([job_id])).get(job_id, archived)
        if "status" not in fields:
            raise NoSuchJob(job_id)
        return fields

    async def _load_some(self, job_id: str, *names: str) -> list[str | None]:
        """Return the id and some fields of a job's hash. Raises ``NoSuchJob``."""
        values: list[str | None] = await self.command("HMGET", job_key(job_id), "id", *names)
        if values[0] is not None:
            return values
        fields = await self._load_fields(job_id)
        return [fields.get(name) for name in ("id", *names)]

    async def list_jobs(
        self, wanted: JobFilter | None = None, *, owner: str | None, after: str | None, limit: int
    ) -> JobListing:
        """Return jobs from newest to oldest, beginning behind the job ``after``; of all owners with ``owner`` None.

        Raises ``NoSuchJob`` if there is no job ``after``.
        """
        wanted = wanted or JobFilter()
        before = None if after is None else await self._find_position(after, owner)
        scan = await self._scan(wanted, owner, before, limit + 1)
        found, outage = dict(scan.found), None
        try:
            found |= await self._list_archived(wanted, owner, before, limit + 1, known=scan.found)
        except ArchiveDown as error:
            outage = str(error)
        floor = -1 if scan.floor is None else scan.floor[0]
        positions = sorted((n for n in found if n >= floor), reverse=True)
        jobs = [serialization.document(found[n]) for n in positions[:limit]]
        if len(positions) <= limit and scan.floor is not None:  # the next page begins behind the last one looked at
            return JobListing(jobs, has_more=True, cursor=scan.floor[1], outage=outage)
        return JobListing(jobs, len(positions) > limit, jobs[-1]["id"] if jobs else None, outage)

    async def _find_position(self, job_id: str, owner: str | None) -> int:
        """Return a job's position in the order of submission. Raises ``NoSuchJob``."""
        index = "reasoner:jobs" if owner is None else f"reasoner:jobs:of:{owner}"
        position = await self.command("ZSCORE", index, job_id)
        if position is None and self.archive is not None:
            position = await self.archive.find_position(job_id, owner)
        if position is None:
            raise NoSuchJob(job_id)
        return int(position)

    async def _scan(self, wanted: JobFilter, owner: str | None, before: int | None, limit: int) -> _Scan:
        """Look at jobs in Redis until ``limit`` are found, or ``MAX_SCANNED`` were looked at."""
        found: dict[int, dict[str, str]] = {}
        size = limit if wanted.is_indexed else _PAGE_SIZE
        for _ in range(math.ceil(MAX_SCANNED / size)):
            rows = await self.script("list", owner or "", "" if before is None else before, size, wanted.status or "")
            for row in rows:
                fields = dict(zip(row[::2], row[1::2], strict=True))
                before = int(fields["n"])
                if wanted.matches(JobFacts(fields)):
                    found[before] = fields
            if len(rows) < size:
                return _Scan(found)
            if len(found) >= limit:
                break
        assert before is not None  # the page was full
        return _Scan(found, (before, fields["id"]))

    async def _list_archived(
        self, wanted: JobFilter, owner: str | None, before: int | None, limit: int, known: dict[int, dict[str, str]]
    ) -> dict[int, dict[str, str]]:
        """Return the archive's jobs by position, without the ``known`` ones. One that is in Redis is as it is there."""
        if self.archive is None:
            return {}
        rows = await self.archive.list_jobs(wanted, owner=owner, before=before, limit=limit)
        known_ids = {fields["id"] for fields in known.values()}
        current = await self._find_present([fields["id"] for _, fields in rows])
        found = {}
        for n, fields in rows:
            present = current.get(fields["id"])
            if fields["id"] in known_ids or present == {"id": fields["id"]}:
                continue
            if present is None or wanted.matches(JobFacts(present)):
                found[n] = present or fields
        return found

    async def _find_present(self, ids: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the hashes of those jobs that are in Redis, by their ids; of deleted ones being moved the id alone."""
        found: dict[str, dict[str, str]] = {}
        for row in await self.script("present", *ids):
            fields = dict(zip(row[::2], row[1::2], strict=True))
            found[fields["id"]] = fields
        return found

    async def iterate_ended(
        self, owner: str | None, since: float, until: float, after: str | None = None
    ) -> AsyncIterator[str]:
        """Yield the ids of the jobs that ended in this time, in the order of their ends; of all owners with None.

        Each is returned once, even if jobs end, are moved or are deleted meanwhile. Of those that ended at ``since``,
        which are in the order of their ids, only those behind ``after`` are there.
        """
        position, last = (round(since * 1000), after or ""), math.floor(until * 1000)
        while True:
            page, position, is_last = await self._list_ended(owner, position, last)
            for _, job_id in page:
                yield job_id
            if is_last:
                return

    async def _list_ended(self, owner: str | None, position: _End, last: int) -> tuple[list[_End], _End, bool]:
        """Return the next ends of both stores, the end up to which there are no others, and True if that is all."""
        rows = await self.script("ended", owner or "", position[0], last, position[1], _PAGE_SIZE)
        pages: list[list[_End]] = [list(zip(map(int, rows[1::2]), rows[::2], strict=True))]
        if self.archive is not None:
            pages.append(await self.archive.list_ended(owner, position, last, _PAGE_SIZE))
        full = [page[-1] for page in pages if len(page) == _PAGE_SIZE]
        sure = min(full, default=(last + 1, ""))
        ended = {item for page in pages for item in page if item <= sure}
        # An end in the archive alone is none if its job was brought back.
        present = await self._find_present(job_id for _, job_id in ended.difference(pages[0]))
        return sorted(item for item in ended if item in pages[0] or item[1] not in present), sure, not full
