"""Batches in Redis: their jobs, and the token budget that the jobs share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, get_args

from reasoner.budget.allocator import MAX_ACTIVE_JOBS, TokenRequest, initial_grant
from reasoner.budget.grant_source import StoredGrants
from reasoner.jobs.batch import BatchStatus, BatchUsage
from reasoner.jobs.job import Status
from reasoner.jobs.journal import JobCancelled, LeaseLost
from workers.config.rate_limits import Quota
from workers.store.claims import Claim
from workers.store.jobs import JobStore, QueueFull, check_submitted, find_submitted, idempotency_record, new_id
from workers.store.request_origin import ORIGIN
from workers.store.serialization import to_json, usage_of

BatchDocument = dict[str, Any]
"""A batch in the API's format: the JSON of ``reasoner.jobs.batch.Batch``."""


class NoSuchBatch(Exception):
    """There is no batch with this id."""


class BatchStore:
    """The batches of a ``JobStore``."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    async def submit(
        self,
        specs: Sequence[dict[str, Any]],
        budget: dict[str, Any],
        metadata: dict[str, str],
        *,
        owner: str,
        queue_cap: int,
        idempotency: tuple[str, str] | None = None,
        quota: Quota | None = None,
    ) -> tuple[BatchDocument, bool]:
        """Store a batch with its jobs. Return it, and True if it is new. Raises what ``JobStore.submit`` raises."""
        key, digest = idempotency_record("batch", owner, idempotency)
        jobs = [part for spec in specs for part in (new_id("job"), to_json(spec), spec["priority"])]
        share = initial_grant(budget["tokens"], len(specs))
        batch = (new_id("batch"), to_json(budget), to_json(metadata), share, MAX_ACTIVE_JOBS)
        quota = quota or Quota()
        arguments = (*batch, owner, ORIGIN.get().to_json(), queue_cap, key, digest, quota.to_json())
        outcome, *details = await self._store.script("batch_submit", *arguments, *jobs)
        if outcome == "full":
            raise QueueFull(f"with these {len(specs)}, more than {queue_cap} jobs would wait", int(details[0]))
        return await self.get(check_submitted(outcome, details, quota)), bool(outcome == "created")

    async def find_repeated(self, owner: str, idempotency: tuple[str, str] | None) -> BatchDocument | None:
        """Return the batch that was submitted before with the same idempotency key, as ``JobStore.find_repeated``."""
        batch_id = await find_submitted(self._store, "batch", owner, idempotency)
        with contextlib.suppress(NoSuchBatch):
            return None if batch_id is None else await self.get(batch_id)
        return None

    async def check_owner(self, batch_id: str, owner: str | None) -> None:
        """Raise ``NoSuchBatch`` for a batch of another owner, as ``JobStore.check_owner`` does."""
        if owner is not None and await self._store.command("HGET", _get_key(batch_id), "owner") != owner:
            raise NoSuchBatch(batch_id)

    async def get(self, batch_id: str) -> BatchDocument:
        """Return the batch with summaries of its jobs. Raises ``NoSuchBatch``."""
        fields = await self._store.command("HGETALL", _get_key(batch_id))
        if not fields:
            raise NoSuchBatch(batch_id)
        rows = {row[0]: row[1:] for row in await self._store.script("batch_jobs", batch_id)}
        gone = [job_id for job_id, (status, *_) in rows.items() if not status]  # moved to the archive
        for job_id, stored in (await self._store.load_archived(gone)).items():
            rows[job_id] = [stored["status"], stored["result"], stored.get("granted", "0")]
            rows[job_id] += [stored.get(name, "0") for name in _SPENT]
        jobs = [
            _build_job(job_id, status, result=result, granted=granted, spent=spent)
            for job_id, (status, result, granted, *spent) in rows.items()
            if status
        ]
        return build_batch_document(fields) | {"jobs": jobs if "input" not in fields else None}

    async def list_batches(self, *, owner: str | None, after: str | None, limit: int) -> list[BatchDocument]:
        """Return batches without their jobs from newest to oldest, beginning behind the batch ``after``.

        ``owner=None`` returns those of all owners. Raises ``NoSuchBatch`` if there is no batch ``after``.
        """
        index = "reasoner:batches" if owner is None else f"reasoner:batches:of:{owner}"
        ids = await self._store.list_ids(index, after, limit)
        if ids is None:
            raise NoSuchBatch(after)
        stored = [await self._store.command("HGETALL", _get_key(batch_id)) for batch_id in ids]
        return [build_batch_document(fields) for fields in stored if fields]

    async def cancel(self, batch_id: str) -> BatchDocument:
        """Cancel every job that has not ended; of a file, its feeder does that. Raises ``NoSuchBatch``."""
        if await self._store.command("HEXISTS", _get_key(batch_id), "input"):
            await self._store.script("file_batch_close", batch_id, "cancelled")
            return await self.get(batch_id)
        best: list[str] = []
        for job_id in await self._store.command("LRANGE", f"{_get_key(batch_id)}:jobs", 0, -1):
            best += (job_id, await self._store.compute_best_so_far(job_id))
        if await self._store.script("batch_cancel", batch_id, *best) == "gone":
            raise NoSuchBatch(batch_id)
        return await self.get(batch_id)

    async def wait_for_budget(self, claim: Claim, request: TokenRequest) -> StoredGrants | None:
        """Request more of the batch's budget. Return the share with which the job continues at once; ``None`` if the
        job was released and waits for a share.

        Raises ``LeaseLost`` if another worker has the job, and ``JobCancelled`` if the job was cancelled and has ended.
        """
        outcome, *share = await self._store.script(
            "park", claim.job_id, claim.token, claim.lease_ms, request.tokens, repr(request.rate)
        )
        match outcome:
            case "granted":
                return StoredGrants(int(share[0]), share[1] == "closed")
            case "lost":
                raise LeaseLost(claim.job_id)
            case "cancelled":
                raise JobCancelled(claim.job_id)
        return None


_SPENT = ("usage:generated", "usage:verifier_computed")


def _get_key(batch_id: str) -> str:
    return f"reasoner:batch:{batch_id}"


def _build_job(job_id: str, status: str, result: str, granted: str, spent: list[str]) -> dict[str, Any]:
    end = json.loads(result or "null")
    return {
        "id": job_id,
        "status": status,
        "answer": None if end is None else end["answer"],
        "tokens": sum(int(float(part)) for part in spent),
        "granted": int(granted),
    }


def build_batch_document(fields: dict[str, str]) -> BatchDocument:
    """Return the document of a batch's hash, without its jobs."""

    def moment(name: str) -> int | None:
        return int(float(fields[name])) if name in fields else None

    counts: dict[Status, int] = {status: int(fields.get(f"count:{status}", 0)) for status in get_args(Status)}
    is_file = "input" in fields
    status = _find_file_status(fields) if is_file else _find_status(fields, counts)
    ends = {name: moment(f"at:{name}") for name in ("completed", "failed", "expired", "cancelled")}
    if not is_file and "finished" in fields:
        ends[status] = moment("finished")
    return {
        "id": fields["id"],
        "object": "batch",
        "endpoint": fields.get("endpoint", "/v1/jobs"),
        "model": json.loads(fields.get("defaults", "{}")).get("model"),
        "errors": json.loads(fields.get("errors", "null")),
        "input_file_id": fields.get("input", ""),
        "completion_window": fields.get("window", "none"),
        "status": status,
        "output_file_id": fields.get("output_file"),
        "error_file_id": fields.get("error_file"),
        "created_at": moment("created"),
        "in_progress_at": moment("at:in_progress") if is_file else moment("created"),
        "expires_at": moment("expires"),
        "finalizing_at": moment("at:finalizing"),
        **{f"{name}_at": at for name, at in ends.items()},
        "cancelling_at": moment("at:closing") if fields.get("closing") != "expired" else None,
        "request_counts": _count_requests(fields, counts),
        "usage": BatchUsage.from_usage(usage_of(fields)).model_dump(),
        "metadata": json.loads(fields["metadata"]),
        "budget": json.loads(fields["budget"]),
        "counts": counts,
        "unassigned": int(fields["pool"]) if "pool" in fields else None,
        "jobs": None,
    }


def _find_status(fields: dict[str, str], counts: dict[Status, int]) -> BatchStatus:
    """Return the status of a batch of given jobs. It is cancelled, too, if each of its jobs was."""
    if int(fields["running"]) > 0:
        return "cancelling" if "cancel" in fields else "in_progress"
    return "cancelled" if "cancel" in fields or counts["cancelled"] == sum(counts.values()) else "completed"


def _find_file_status(fields: dict[str, str]) -> BatchStatus:
    stage: BatchStatus = fields["stage"]  # type: ignore[assignment]  # as the scripts write it
    if stage in ("validating", "in_progress", "finalizing") and "closing" in fields:
        return "finalizing" if fields["closing"] == "expired" else "cancelling"
    return stage


def _count_requests(fields: dict[str, str], counts: dict[Status, int]) -> dict[str, int]:
    """Return ``RequestCounts``: those of jobs, and of a file whose lines have all ended, those of its results."""
    completed, failed = counts["completed"] + counts["incomplete"], counts["failed"] + counts["cancelled"]
    total = int(fields.get("total", sum(counts.values())))
    if "at:finalizing" in fields:
        completed, failed = int(fields["succeeded"]), int(fields["errored"])
    return {"total": total, "completed": completed, "failed": failed}
