"""Jobs that have ended, for tests of the archive."""

from __future__ import annotations

from typing import Any

from reasoner.jobs.job import JobError, JobResult
from tests.specs import build_spec
from tests.workers.store.helpers import RESULT, claim, entry
from workers.archive.archive import Archive
from workers.store.jobs import JobStore


async def submit_job(store: JobStore, owner: str = "local", **fields: Any) -> str:
    fields = {"problem": "1 + 1?", "strategy": {"name": "greedy"}, "seed": 7, **fields}
    job, _ = await store.submit(build_spec(fields).model_dump(), owner=owner, queue_cap=1000)
    return str(job["id"])


async def end(store: JobStore, job_id: str, status: str = "completed", result: JobResult | None = RESULT) -> None:
    held = await claim(store, job_id)
    await store.commit(held, [entry("a"), entry("é\n\x00", 4)])
    failure = JobError(code="internal", message="broken") if status == "failed" else None
    assert await store.finish(held, status, result=None if failure else result, error=failure)


async def make_ended(store: JobStore, status: str = "completed", **fields: Any) -> str:
    job_id = await submit_job(store, **fields)
    await end(store, job_id, status)
    return job_id


async def list_ids(store: JobStore, owner: str | None = None) -> list[str]:
    listing = await store.list_jobs(owner=owner, after=None, limit=100)
    return [job["id"] for job in listing.jobs]


async def find_places(store: JobStore, archive: Archive, job_id: str) -> tuple[bool, bool]:
    """Return True for Redis if the job is there, and True for the archive."""
    in_redis = bool(await store.command("EXISTS", f"reasoner:job:{job_id}"))
    return in_redis, bool(await archive.load_fields([job_id]))
