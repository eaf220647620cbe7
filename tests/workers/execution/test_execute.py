"""Execution of a wake-up by a worker, for every outcome of the search."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
import structlog
from structlog.testing import capture_logs

from engine.protocol.types import EngineClient, EngineError, EngineUnavailable, InvalidRequest
from reasoner.budget.allocator import TokenRequest
from reasoner.budget.grant_source import WaitingForBudget
from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import Entry, JobCancelled, Journal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import RunJob, execute
from workers.execution.leases import Leases
from workers.store.batches import BatchStore
from workers.store.jobs import JobStore

SPEC = build_spec(problem="1 + 1?", model="policy", seed=1).model_dump()
OUTCOME = JobOutcome(
    "completed", JobResult(answer="2", text="2", confidence=None, finish_reason="answer", node="0"), Usage()
)
LEASE = 0.6


def entry(key: str) -> Entry:
    return Entry(key, "node", {"node": key}, Usage(generated=1), 0.0)


async def submit(store: JobStore, spec: dict[str, Any] = SPEC) -> str:
    job, _ = await store.submit(spec, owner="local", queue_cap=10)
    return str(job["id"])


async def wake(store: JobStore, job_id: str, run: RunJob, draining: asyncio.Event | None = None) -> None:
    async with asyncio.timeout(20):
        await execute(
            job_id,
            store=store,
            engine=ScriptedEngine(),
            run=run,
            shutting_down=draining or asyncio.Event(),
            leases=Leases(store, LEASE),
            claims=ClaimQueue(store, lease=LEASE, max_attempts=3),
        )


async def test_a_completed_search_completes_its_job(store: JobStore) -> None:
    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        assert (spec.problem, await journal.load()) == ("1 + 1?", [])
        await journal.append([entry("a")])
        return OUTCOME

    job_id = await submit(store)
    await wake(store, job_id, run)
    job = await store.get(job_id)
    assert (job["status"], job["result"]["answer"], job["usage"]["generated"]) == ("completed", "2", 1)


async def test_a_duplicate_wake_up_runs_nothing(store: JobStore) -> None:
    runs = 0

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.05)
        return OUTCOME

    job_id = await submit(store)
    await asyncio.gather(*(wake(store, job_id, run) for _ in range(5)))
    await wake(store, job_id, run)
    assert runs == 1


async def test_a_search_longer_than_its_lease_keeps_it(store: JobStore) -> None:
    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        await asyncio.sleep(2.5 * LEASE)
        assert await store.claim(job_id, lease=LEASE, max_attempts=3, worker="other") is None
        return OUTCOME

    job_id = await submit(store)
    await wake(store, job_id, run)
    assert (await store.get(job_id))["attempt"] == 1


async def test_a_job_with_grants_faster_than_its_heartbeat_keeps_its_lease(store: JobStore) -> None:
    runs, pause = 0, LEASE / 12

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        nonlocal runs
        runs += 1
        await asyncio.sleep(pause)
        assert await store.claim(job_id, lease=LEASE, max_attempts=3, worker="other") is None
        if runs * pause < 2.5 * LEASE:
            raise WaitingForBudget(TokenRequest(1, 0.5))
        return OUTCOME

    made, _ = await BatchStore(store).submit([SPEC], {"tokens": 1000}, {}, owner="local", queue_cap=10)
    job_id = made["jobs"][0]["id"]
    await wake(store, job_id, run)
    job = await store.get(job_id)
    assert (job["status"], job["attempt"]) == ("completed", 1)


async def test_a_slowly_used_grant_keeps_the_lease_too(store: JobStore) -> None:
    runs = 0

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise WaitingForBudget(TokenRequest(1, 0.5))
        await asyncio.sleep(2.5 * LEASE)
        assert await store.claim(job_id, lease=LEASE, max_attempts=3, worker="other") is None
        return OUTCOME

    made, _ = await BatchStore(store).submit([SPEC], {"tokens": 1000}, {}, owner="local", queue_cap=10)
    job_id = made["jobs"][0]["id"]
    await wake(store, job_id, run)
    assert (await store.get(job_id))["attempt"] == 1


@pytest.mark.parametrize("why", ["waits", "lost", "cancelled"])
async def test_the_outcome_of_a_grant_request_is_logged_correctly(store: JobStore, url: str, why: str) -> None:
    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        if why == "lost":
            with redis.Redis.from_url(url) as client:
                client.hset(f"reasoner:job:{job_id}", "lease", 1)
            assert await store.claim(job_id, lease=60, max_attempts=3, worker="other") is not None
        if why == "cancelled":
            await store.cancel(job_id)
        raise WaitingForBudget(TokenRequest(1, 0.5))

    made, _ = await BatchStore(store).submit([SPEC, SPEC], {"tokens": 1000}, {}, owner="local", queue_cap=10)
    job_id = made["jobs"][0]["id"]
    with capture_logs() as logs:
        await wake(store, job_id, run)
    said = {"waits": "job waits for its share", "lost": "lease lost: another worker has the job"}
    assert [line["event"] for line in logs] == ["job claimed", said.get(why, "job cancelled")]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidRequest("the problem is too long", "problem"), "invalid_request", "the problem is too long"),
        (EngineError("out of memory"), "engine_error", "out of memory"),
        (ValueError("a bug"), "internal_error", "ValueError: a bug"),
    ],
)
async def test_a_failed_search_fails_its_job_with_the_reason(
    store: JobStore, error: Exception, code: str, message: str
) -> None:
    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        raise error

    job_id = await submit(store)
    await wake(store, job_id, run)
    job = await store.get(job_id)
    assert (job["status"], job["error"]) == ("failed", {"code": code, "message": message})


async def test_a_job_of_an_unsupported_version_fails_with_the_reason(store: JobStore) -> None:
    job_id = await submit(store, {**SPEC, "strategy": {"name": "oracle"}})
    await wake(store, job_id, run_job)
    job = await store.get(job_id)
    assert job["error"]["code"] == "invalid_spec"
    assert "oracle" in job["error"]["message"]


async def test_without_an_engine_the_job_waits_and_continues_from_its_journal(store: JobStore, url: str) -> None:
    async def away(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        await journal.append([entry("a")])
        raise EngineUnavailable("connection refused")

    async def back(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        assert [held.key for held in await journal.load()] == ["a"]
        return OUTCOME

    job_id = await submit(store)
    await wake(store, job_id, away)
    job = await store.get(job_id)
    assert (job["status"], job["attempt"]) == ("queued", 0)
    assert await store.reap(3) == []  # not due for a few seconds
    with redis.Redis.from_url(url) as client:
        client.zadd("reasoner:due", {job_id: 1})
    assert await store.reap(3) == [(job_id, "interactive")]
    await wake(store, job_id, back)
    assert (await store.get(job_id))["status"] == "completed"


async def test_a_search_without_writes_is_notified_of_its_cancellation(store: JobStore) -> None:
    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        await store.cancel(job_id)
        await cancelled.wait()
        raise JobCancelled

    job_id = await submit(store)
    await wake(store, job_id, run)
    assert (await store.get(job_id))["status"] == "cancelled"


async def test_a_cancelled_search_returns_its_best_result_so_far(store: JobStore) -> None:
    found = JobResult(answer="2", text="2", confidence=0.5, finish_reason="cancelled", node="0")

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        end = JobCancelled()
        end.result = found
        raise end

    job_id = await submit(store)
    await wake(store, job_id, run)
    job = await store.get(job_id)
    assert (job["status"], job["result"]) == ("cancelled", found.model_dump())


async def test_a_writing_search_is_notified_of_its_cancellation_and_billed_for_its_writes(store: JobStore) -> None:
    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        await store.cancel(job_id)
        await journal.append([entry("a")])
        raise AssertionError("append raises")

    job_id = await submit(store)
    await wake(store, job_id, run)
    job = await store.get(job_id)
    assert (job["status"], job["usage"]["generated"]) == ("cancelled", 1)


async def test_a_worker_shutting_down_releases_its_job_after_committing_work_in_flight(
    store: JobStore,
) -> None:
    draining = asyncio.Event()

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        await journal.append([entry("a")])
        draining.set()
        try:
            await asyncio.Event().wait()
        finally:
            await journal.append([entry("in flight")])
        raise AssertionError("cancelled above")

    job_id = await submit(store)
    await wake(store, job_id, run, draining)
    job = await store.get(job_id)
    assert (job["status"], job["attempt"], job["usage"]["generated"]) == ("queued", 0, 2)
    assert (await store.load_events(job_id))[-1].data["reason"] == "shutdown"
    assert await store.reap(3) == [(job_id, "interactive")]


async def test_a_worker_that_lost_its_lease_stops_and_writes_nothing(store: JobStore, url: str) -> None:
    stopped = asyncio.Event()

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        with redis.Redis.from_url(url) as client:
            client.hset(f"reasoner:job:{job_id}", "lease", 1)
        assert await store.claim(job_id, lease=60, max_attempts=3, worker="other") is not None
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
            await journal.append([entry("late")])
        raise AssertionError("cancelled above")

    job_id = await submit(store)
    await wake(store, job_id, run)
    assert stopped.is_set()
    job = await store.get(job_id)
    assert (job["status"], job["attempt"], job["usage"]["generated"]) == ("in_progress", 2, 0)


async def test_the_log_names_a_missing_model_and_no_other_error_text(store: JobStore) -> None:
    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        raise errors.pop()

    errors = [InvalidRequest("a secret of the problem", "problem"), InvalidRequest("'x' is not served", "model")]
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            await wake(store, await submit(store), run)
    failures = [entry for entry in logs if entry["event"] == "job failed"]
    assert [entry.get("reason") for entry in failures] == ["'x' is not served", None]
    assert "secret" not in str(logs)
