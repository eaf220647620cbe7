"""Jobs with a deadline: not begun by then, they end without a worker; begun, they are the search's to end."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import redis

from engine.protocol.types import EngineUnavailable
from reasoner.jobs.job import JobError
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.workers.execution.test_engine_wait import attempt
from tests.workers.store.helpers import SPEC, claim, types
from workers.store.batches import BatchStore
from workers.store.jobs import JobStore, NotRetryable

PAST, FUTURE = 1.5e9, 1e10


async def submit(store: JobStore, deadline: float) -> str:
    job, _ = await store.submit(SPEC | {"deadline": deadline}, owner="local", queue_cap=10)
    return str(job["id"])


async def set_spec(store: JobStore, job_id: str, spec: dict[str, Any]) -> None:
    """Change a stored job, as if its deadline had passed meanwhile."""
    await store.command("HSET", f"reasoner:job:{job_id}", "spec", json.dumps(spec))


async def test_the_reaper_ends_jobs_that_nobody_has_begun_by_their_deadline(store: JobStore, url: str) -> None:
    late, early = await submit(store, PAST), await submit(store, FUTURE)
    assert await store.reap(3) == [(early, "interactive")]
    job = await store.get(late)
    assert (job["status"], job["error"]["code"], job["started_at"]) == ("failed", "expired", None)
    assert await types(store, late) == ["job.queued", "job.failed"]
    assert (await store.get(early))["status"] == "queued"
    await store.cancel(early)
    with redis.Redis.from_url(url) as client:
        assert client.zcard("reasoner:deadlines") == 0


async def test_a_worker_that_comes_before_the_reaper_gets_the_next_job(store: JobStore) -> None:
    late, early = await submit(store, PAST), await submit(store, FUTURE)
    held = await store.claim(late, lease=60, max_attempts=3, worker="w", by_turn=True)
    assert held is not None
    assert held.job_id == early
    assert (await store.get(late))["error"]["code"] == "expired"


async def test_a_job_that_has_begun_is_not_ended_by_the_reaper(store: JobStore, url: str) -> None:
    job_id = await submit(store, FUTURE)
    held = await claim(store, job_id)
    with redis.Redis.from_url(url) as client:
        assert client.zcard("reasoner:deadlines") == 0
    await store.release(held, reason="shutdown", detail="")
    assert await store.reap(3) == [(job_id, "interactive")]
    assert (await store.get(job_id))["status"] == "queued"


async def test_an_expired_job_of_a_batch_leaves_its_share_to_the_others(store: JobStore) -> None:
    batches = BatchStore(store)
    specs = [SPEC | {"deadline": deadline} for deadline in (PAST, FUTURE)]
    batch, _ = await batches.submit(specs, {"tokens": 1000}, {}, owner="local", queue_cap=10)
    await store.reap(3)
    after = await batches.get(batch["id"])
    assert (after["counts"]["failed"], after["counts"]["queued"]) == (1, 1)
    kept = next(job for job in after["jobs"] if job["status"] == "queued")
    assert after["unassigned"] == 1000 - kept["granted"]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_job_is_not_retried_after_its_deadline(store: JobStore, begun: bool) -> None:
    job_id = await submit(store, FUTURE if begun else PAST)
    if begun:
        error = JobError(code="engine_error", message="oom")
        await store.finish(await claim(store, job_id), "failed", error=error)
        await store.retry(job_id, queue_cap=10)
        await store.finish(await claim(store, job_id), "failed", error=error)
        await set_spec(store, job_id, SPEC | {"deadline": PAST})
    else:
        await store.reap(3)
    with pytest.raises(NotRetryable, match="deadline has passed"):
        await store.retry(job_id, queue_cap=10)


async def test_a_job_whose_engine_is_away_ends_at_its_deadline(store: JobStore) -> None:
    deadline = time.time() + 3600
    spec = build_spec(problem="?", model="policy", seed=1, deadline=deadline).model_dump()
    job, _ = await store.submit(spec, owner="local", queue_cap=10)
    away = EngineUnavailable("away", 7200.0)
    assert (await attempt(store, job["id"], error=away, wait=None)).status == "queued"
    due = await store.command("ZSCORE", "reasoner:due", job["id"])
    assert float(due) / 1000 < deadline + 60, "the last attempt is at the deadline, not in two hours"
    await set_spec(store, job["id"], spec | {"deadline": PAST})
    ended = await attempt(store, job["id"])
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("failed", "engine_unavailable")
    assert "deadline has passed" in ended.error.message


async def test_a_search_after_its_deadline_ends_as_by_a_budget_of_time() -> None:
    engine = ScriptedEngine()
    for deadline, is_late in ((FUTURE, False), (PAST, True)):
        spec = build_spec(problem="1 + 1?", model="policy", seed=1, strategy={"name": "greedy"}, deadline=deadline)
        outcome = await run_job(spec, engine, MemoryJournal())
        assert (outcome.result.finish_reason == "budget", outcome.usage.generated == 0) == (is_late, is_late)
