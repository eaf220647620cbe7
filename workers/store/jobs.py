"""Jobs in Redis. Each change is one Lua script (``workers/store/lua``) and therefore atomic."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import ValidationError

from reasoner.best_so_far import choose_best_so_far
from reasoner.jobs.job import TERMINAL_STATUSES
from reasoner.jobs.spec import JobSpec
from workers.config.rate_limits import Quota
from workers.store import serialization
from workers.store.broker_errors import BROKER_DOWN
from workers.store.claims import Claims
from workers.store.event_log import EventLog, ShuttingDown
from workers.store.reaping import Reaping
from workers.store.redis_client import RedisClient
from workers.store.request_origin import ORIGIN, Origin
from workers.store.serialization import JobDocument, job_key, to_json

_PAGE_SIZE = 100


class QueueFull(Exception):
    """The queue holds the maximum number of waiting jobs."""


class IdempotencyConflict(Exception):
    """The same idempotency key came with another body."""


class NoSuchJob(Exception):
    """There is no job with this id."""


class JobActive(Exception):
    """Only a job that has ended can be deleted."""


class NotRetryable(Exception):
    """The job has not failed, or its share of a batch's budget is used up; the message gives the reason."""


class JobStore(EventLog, Claims, Reaping):
    """One event loop's access to the jobs: the operations of clients here, the others in the base classes."""

    async def submit(
        self,
        spec: dict[str, Any],
        *,
        owner: str,
        queue_cap: int,
        idempotency: tuple[str, str] | None = None,
        form: str = "",
        quota: Quota | None = None,
    ) -> tuple[JobDocument, bool]:
        """Store a job. Return it, and True if it is new.

        ``idempotency``: the client's key and the digest of its body. ``form``: data of the request that the route needs
        later, besides the spec. ``quota``: the limits of all of the owner's jobs together; a limit on tokens requires
        that the spec has a budget of tokens. Raises ``QueueFull``, ``IdempotencyConflict``, ``QuotaExceeded``.
        """
        key, digest = idempotency_record("job", owner, idempotency)
        quota = quota or Quota()
        origin, body = ORIGIN.get().to_json(), to_json(spec)
        arguments = (body, spec["priority"], owner, origin, queue_cap, key, digest, form, quota.to_json())
        outcome, *details = await self.script("submit", new_id("job"), *arguments)
        if outcome == "created":
            _, fields = details
            return serialization.document(dict(zip(fields[::2], fields[1::2], strict=True))), True
        if outcome == "full":
            raise QueueFull(f"{queue_cap} jobs are waiting")
        return await self.get(check_submitted(outcome, details, quota)), False

    async def find_repeated(self, owner: str, idempotency: tuple[str, str] | None) -> JobDocument | None:
        """Return the job that was submitted before with the same idempotency key; ``None`` if this is the first time.

        It may have been submitted meanwhile: ``submit`` looks again. Raises ``IdempotencyConflict``.
        """
        job_id = await find_submitted(self, "job", owner, idempotency)
        with contextlib.suppress(NoSuchJob):
            return None if job_id is None else await self.get(job_id)
        return None

    async def check_owner(self, job_id: str, owner: str | None) -> None:
        """Raise ``NoSuchJob`` for a job of another owner; ``None`` may see the jobs of all owners.

        The other methods trust the id of a job: check each id that comes from a client here first. An owner never
        changes, so the check stays valid.
        """
        if owner is not None and await self.command("HGET", job_key(job_id), "owner") != owner:
            raise NoSuchJob(job_id)

    async def get(self, job_id: str) -> JobDocument:
        """Return the job. Raises ``NoSuchJob``."""
        fields = await self.command("HGETALL", job_key(job_id))
        if not fields:
            raise NoSuchJob(job_id)
        return serialization.document(fields)

    async def get_form(self, job_id: str) -> str | None:
        """Return the ``form`` given to ``submit``; ``None`` if there was none, or there is no such job."""
        form: str | None = await self.command("HGET", job_key(job_id), "form")
        return form

    async def get_owner(self, job_id: str) -> str:
        """Return the owner of a job. Raises ``NoSuchJob``."""
        owner = await self.command("HGET", job_key(job_id), "owner")
        if owner is None:
            raise NoSuchJob(job_id)
        return str(owner)

    async def get_origin(self, job_id: str) -> Origin:
        """Return the origin of a job; an empty one if there is no such job."""
        return Origin.from_json(await self.command("HGET", job_key(job_id), "origin") or "{}")

    async def list_jobs(
        self, *, owner: str | None, after: str | None, limit: int, status: str | None
    ) -> list[JobDocument]:
        """Return jobs from newest to oldest, beginning behind the job ``after``; of all owners with ``owner`` None.

        Raises ``NoSuchJob`` if there is no job ``after``.
        """
        rows = await self.script("list", owner or "", after or "", limit, status or "")
        if rows is None:
            raise NoSuchJob(after)
        return [serialization.document(dict(zip(row[::2], row[1::2], strict=True))) for row in rows]

    async def cancel(self, job_id: str) -> JobDocument:
        """Cancel a job; one that has ended stays as it is. Raises ``NoSuchJob``."""
        if await self.script("cancel", job_id, await self.compute_best_so_far(job_id)) == "gone":
            raise NoSuchJob(job_id)
        return await self.get(job_id)

    async def cancel_abandoned(self, job_id: str) -> None:
        """Cancel a job that nobody waits for. Outlasts an absent broker, which nobody else could be told about.

        Raises ``NoSuchJob``, and ``ShuttingDown`` after ``end_waits``.
        """
        while True:
            try:
                await self.cancel(job_id)
                return
            except BROKER_DOWN as error:
                await self._wait_for_broker()
                if self._closing.is_set():
                    raise ShuttingDown(job_id) from error

    async def compute_best_so_far(self, job_id: str) -> str:
        """Return the result (JSON) that an unfinished job's journal allows; ``null`` if its search has not begun.

        It becomes the result of a cancelled job that has no worker, or whose worker is lost.
        """
        status, spec = await self.command("HMGET", job_key(job_id), "status", "spec")
        if status is None or status in TERMINAL_STATUSES:
            return "null"
        entries = await self.load_entries(job_id)
        try:
            result = choose_best_so_far(JobSpec.model_validate_json(spec), entries) if entries else None
        except ValidationError:  # stored by another version: no worker could run it either
            return "null"
        return "null" if result is None else result.model_dump_json()

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended. Raises ``NoSuchJob``, ``JobActive``."""
        outcome = await self.script("delete", job_id)
        if outcome == "gone":
            raise NoSuchJob(job_id)
        if outcome == "active":
            raise JobActive(job_id)

    async def retry(self, job_id: str, *, queue_cap: int, quota: Quota | None = None) -> JobDocument:
        """Queue a failed job again, with the journal that it has. ``quota``: as for ``submit``.

        Raises ``NoSuchJob``, ``NotRetryable``, ``QueueFull``, ``QuotaExceeded``.
        """
        quota = quota or Quota()
        outcome, *details = await self.script("retry", job_id, queue_cap, quota.to_json())
        match outcome:
            case "ok":
                return await self.get(job_id)
            case "gone":
                raise NoSuchJob(job_id)
            case "full":
                raise QueueFull(f"{queue_cap} jobs are waiting")
            case "jobs" | "tokens":
                raise quota.exceeded(outcome, *map(int, details))
            case "line":
                raise NotRetryable("it is a line of a batch's file, in whose results it is an error")
            case "expired":
                raise NotRetryable("its deadline has passed: submit it again with a later one")
            case "shared":
                raise NotRetryable("its batch was cancelled, or its share of the budget has gone to other jobs")
            case status:
                raise NotRetryable(f"only a failed job can be retried, and this one is {status}")

    async def get_broker_time(self) -> float:
        """Return the broker's clock in seconds since the epoch. All times of jobs are by this clock."""
        seconds, microseconds = await self.command("TIME")
        return int(seconds) + int(microseconds) / 1e6

    async def iterate_ended(
        self, owner: str | None, since: float, until: float, after: str | None = None
    ) -> AsyncIterator[str]:
        """Yield the ids of the jobs that ended in this time, in the order of their ends; of all owners with None.

        Each is returned once, even if jobs end or are deleted meanwhile. Of those that ended at ``since``, which are in
        the order of their ids, only those behind ``after`` are there.
        """
        first, last = round(since * 1000), math.floor(until * 1000)
        lowest = first
        # Ids that ended in the millisecond ``lowest``: many may, when a batch is cancelled.
        seen: set[str] = set()
        while True:
            rows = await self.script("ended", owner or "", lowest, last, len(seen) + _PAGE_SIZE)
            pairs = zip(rows[::2], map(int, rows[1::2]), strict=True)
            unseen = [(job_id, ended) for job_id, ended in pairs if job_id not in seen]
            for job_id, ended in unseen:
                if ended > lowest:
                    lowest, seen = ended, set()
                seen.add(job_id)
                if after is None or ended > first or job_id > after:
                    yield job_id
            if not unseen:
                return

    async def wait_for_end(self, job_id: str, seconds: float) -> JobDocument:
        """Return the job when it has ended, or its state at the time limit. Raises ``NoSuchJob``."""
        job = await self.get(job_id)
        if job["status"] in TERMINAL_STATUSES or seconds <= 0:
            return job
        with contextlib.suppress(TimeoutError, ShuttingDown):
            async with asyncio.timeout(seconds):
                async for _ in self.follow(job_id, job["last_seq"]):
                    pass
        return await self.get(job_id)


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def check_submitted(outcome: str, details: list[str], quota: Quota) -> str:
    """Return the id of what a script has stored. Raises ``QuotaExceeded``, ``IdempotencyConflict``."""
    if outcome in ("jobs", "tokens"):
        raise quota.exceeded(outcome, *map(int, details))
    if outcome == "conflict":
        raise IdempotencyConflict(f"this key was used for {details[0]} with another body")
    return details[0]


async def find_submitted(
    store: RedisClient, kind: Literal["job", "batch"], owner: str, idempotency: tuple[str, str] | None
) -> str | None:
    """Return the id of the job or batch of an idempotency key. Raises ``IdempotencyConflict``."""
    key, digest = idempotency_record(kind, owner, idempotency)
    if not key:
        return None
    earlier, body = await store.command("HMGET", key, "job", "digest")
    if earlier is None or not await store.command("EXISTS", f"reasoner:{kind}:{earlier}"):
        return None
    return check_submitted("replayed" if body == digest else "conflict", [earlier], Quota())


def idempotency_record(kind: str, owner: str, idempotency: tuple[str, str] | None) -> tuple[str, str]:
    """Return the Redis key of an owner's idempotency key, and the digest of the body; empty strings without a key."""
    if idempotency is None:
        return "", ""
    key, digest = idempotency
    return f"reasoner:idempotency:{kind}:{owner}:{hashlib.sha256(key.encode()).hexdigest()}", digest
