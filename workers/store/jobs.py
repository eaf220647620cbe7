"""Jobs in Redis. Each change is one Lua script (``workers/store/lua``) and therefore atomic."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from pydantic import ValidationError

from reasoner.best_so_far import choose_best_so_far
from reasoner.jobs.job import TERMINAL_STATUSES
from reasoner.jobs.spec import JobSpec
from workers.config.rate_limits import UNKNOWN_WAIT_SECONDS, Quota
from workers.store import serialization
from workers.store.broker_errors import BROKER_DOWN
from workers.store.claims import Claims
from workers.store.event_log import ShuttingDown
from workers.store.history import JobHistory
from workers.store.history import NoSuchJob as NoSuchJob
from workers.store.reaping import Reaping
from workers.store.redis_client import RedisClient
from workers.store.request_origin import ORIGIN
from workers.store.serialization import JobDocument, job_key, to_json


class QueueFull(Exception):
    """The queue holds the maximum number of waiting jobs. ``retry_after``: seconds until it may not."""

    def __init__(self, message: str, retry_after: int) -> None:
        """``retry_after``: an estimate, 0 for none."""
        super().__init__(message)
        self.retry_after = retry_after or UNKNOWN_WAIT_SECONDS


class IdempotencyConflict(Exception):
    """The same idempotency key came with another body."""


class JobActive(Exception):
    """Only a job that has ended can be deleted."""


class NotRetryable(Exception):
    """The job has not failed, or its share of a batch's budget is used up; the message gives the reason."""


class JobStore(JobHistory, Claims, Reaping):
    """One event loop's access to the jobs: what clients change here, the other operations in the base classes."""

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
            raise QueueFull(f"{queue_cap} jobs are waiting", int(details[0]))
        return await self.get(check_submitted(outcome, details, quota)), False

    async def find_repeated(self, owner: str, idempotency: tuple[str, str] | None) -> JobDocument | None:
        """Return the job that was submitted before with the same idempotency key; ``None`` if this is the first time.

        It may have been submitted meanwhile: ``submit`` looks again. Raises ``IdempotencyConflict``.
        """
        job_id = await find_submitted(self, "job", owner, idempotency)
        with contextlib.suppress(NoSuchJob):
            return None if job_id is None else await self.get(job_id)
        return None

    async def cancel(self, job_id: str) -> JobDocument:
        """Cancel a job; one that has ended stays as it is. Raises ``NoSuchJob``."""
        await self.script("cancel", job_id, await self.compute_best_so_far(job_id))
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
        if outcome == "active":
            raise JobActive(job_id)
        if outcome == "ok":
            return
        archived = await self.load_archived([job_id])
        if outcome == "gone" and not archived:
            raise NoSuchJob(job_id)
        await self.delete_archived(list(archived.values()))

    async def delete_archived(self, jobs: Sequence[Mapping[str, str]]) -> None:
        """Delete jobs of the archive by their hashes, and their places in batches and idempotency keys in Redis."""
        if self.archive is None or not jobs:
            return
        for fields in jobs:
            traces = (fields.get("batch", ""), fields.get("idempotency", ""))
            await self.script("archive_delete", fields["id"], fields["owner"], *traces)
        await self.archive.delete([fields["id"] for fields in jobs])

    async def retry(self, job_id: str, *, queue_cap: int, quota: Quota | None = None) -> JobDocument:
        """Queue a failed job again, with the journal that it has. ``quota``: as for ``submit``.

        Raises ``NoSuchJob``, ``NotRetryable``, ``QueueFull``, ``QuotaExceeded``.
        """
        quota = quota or Quota()
        await self._bring_back(job_id)
        outcome, *details = await self.script("retry", job_id, queue_cap, quota.to_json())
        match outcome:
            case "ok":
                return await self.get(job_id)
            case "gone":
                raise NoSuchJob(job_id)
            case "full":
                raise QueueFull(f"{queue_cap} jobs are waiting", int(details[0]))
            case "jobs" | "tokens":
                raise quota.exceeded(outcome, *map(int, details))
            case "line":
                raise NotRetryable("it is a line of a batch's file, in whose results it is an error")
            case "expired":
                raise NotRetryable("its deadline has passed: submit it again with a later one")
            case "shared":
                raise NotRetryable("its batch was cancelled, or its share of the budget has gone to other jobs")
            case status:
                raise NotRetryable(_describe_unfailed(status))

    async def _bring_back(self, job_id: str) -> None:
        """Bring a failed job back from the archive."""
        if self.archive is None or await self.command("EXISTS", job_key(job_id)):
            return
        fields = (await self.load_archived([job_id])).get(job_id)
        entries = await self.archive.load_entries(job_id)
        if fields is None or entries is None:
            return
        if fields["status"] != "failed":
            raise NotRetryable(_describe_unfailed(fields["status"]))
        arguments: list[str | int] = [job_id, 2 * len(fields), *chain.from_iterable(fields.items())]
        for entry_id, parts in entries:
            arguments += (entry_id, 2 * len(parts), *chain.from_iterable(parts.items()))
        await self.script("archive_restore", *arguments)

    async def get_broker_time(self) -> float:
        """Return the broker's clock in seconds since the epoch. All times of jobs are by this clock."""
        seconds, microseconds = await self.command("TIME")
        return int(seconds) + int(microseconds) / 1e6

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


def _describe_unfailed(status: str) -> str:
    return f"only a failed job can be retried, and this one is {status}"


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
    earlier, body, archived = await store.command("HMGET", key, "job", "digest", "archived")
    if earlier is None or not (archived or await store.command("EXISTS", f"reasoner:{kind}:{earlier}")):
        return None
    return check_submitted("replayed" if body == digest else "conflict", [earlier], Quota())


def idempotency_record(kind: str, owner: str, idempotency: tuple[str, str] | None) -> tuple[str, str]:
    """Return the Redis key of an owner's idempotency key, and the digest of the body; empty strings without a key."""
    if idempotency is None:
        return "", ""
    key, digest = idempotency
    return f"reasoner:idempotency:{kind}:{owner}:{hashlib.sha256(key.encode()).hexdigest()}", digest
