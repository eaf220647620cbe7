"""Batches in the store: the shared budget is distributed by the rule of ``benchmarks.batch.shared_budget``."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import redis
from openai.types import Batch as OpenAIBatch

from benchmarks.batch.shared_budget import TokenPool
from engine.protocol.types import EngineClient
from reasoner.budget.allocator import MAX_ACTIVE_JOBS, TokenRequest
from reasoner.budget.usage import Usage
from reasoner.jobs.batch import BatchUsage
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import Entry, JobCancelled, Journal, LeaseLost
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from tests.long import mostly_long_grid
from tests.scripted import ScriptedEngine
from tests.seeds import shift
from tests.specs import build_spec
from tests.workers.store.helpers import expire, solution
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import RunJob, execute
from workers.execution.leases import Leases
from workers.store.batches import BatchStore, NoSuchBatch
from workers.store.claims import Claim
from workers.store.jobs import IdempotencyConflict, JobActive, JobStore, QueueFull

SPEC: dict[str, Any] = build_spec(problem="1 + 1?", strategy={"name": "greedy"}, seed=7, priority="batch").model_dump()
RESULT = JobResult(answer="2", text="\\boxed{2}", confidence=None, finish_reason="answer", node="0")


async def submit(store: JobStore, count: int, tokens: int, **options: Any) -> tuple[str, list[str]]:
    made, _ = await BatchStore(store).submit(
        [SPEC] * count,
        {"tokens": tokens},
        {"a": "b"},
        owner=options.pop("owner", "local"),
        queue_cap=options.pop("queue_cap", 1000),
        **options,
    )
    return str(made["id"]), [job["id"] for job in made["jobs"]]


async def claim(store: JobStore, job_id: str) -> Claim:
    held = await store.claim(job_id, lease=60, max_attempts=100, worker="w")
    assert held is not None
    return held


def spend(key: str, tokens: int) -> Entry:
    return Entry(key, "lost", {}, Usage(generated=tokens), 0.0)


async def test_a_batch_grants_each_job_a_floor_and_keeps_the_rest_in_the_pool(store: JobStore) -> None:
    batch_id, jobs = await submit(store, 3, 1200)
    batch = await BatchStore(store).get(batch_id)
    assert (batch["status"], batch["counts"]["queued"], batch["unassigned"]) == ("in_progress", 3, 900)
    assert [job["granted"] for job in batch["jobs"]] == [100, 100, 100]
    assert (await store.get(jobs[0]))["batch"] == batch_id
    held = await claim(store, jobs[0])
    assert held.share is not None
    assert (held.share.granted, held.share.closed) == (100, False)
    await store.commit(held, [spend("a", 40)])
    await store.finish(held, "completed", result=RESULT)
    batch = await BatchStore(store).get(batch_id)
    assert (batch["status"], batch["usage"]["generated"], batch["unassigned"]) == ("in_progress", 40, 960)
    assert (batch["jobs"][0]["answer"], batch["jobs"][0]["tokens"]) == ("2", 40)
    for job_id in jobs[1:]:
        await store.cancel(job_id)
    batch = await BatchStore(store).get(batch_id)
    assert (batch["status"], batch["counts"]["cancelled"], batch["unassigned"]) == ("completed", 2, 1160)
    assert batch["completed_at"] is not None
    OpenAIBatch.model_validate(batch)


@pytest.mark.parametrize("seed", range(8))
async def test_random_histories_get_the_grants_of_the_allocator(store: JobStore, url: str, seed: int) -> None:
    rng = random.Random(shift(seed))
    budget = rng.choice([40, 400, 4000])
    batch_id, jobs = await submit(store, 24, budget)
    pool, batches = TokenPool(budget, jobs), BatchStore(store)
    held: dict[str, Claim] = {}
    spent = dict.fromkeys(jobs, 0)
    alive, closed = set(jobs), set()
    ready = set(jobs)
    for step in range(3000):
        if not alive:
            break
        assert ready, "every job waits, and nobody can give anything"
        job = rng.choice(sorted(ready))
        if job not in held:
            held[job] = await claim(store, job)
            assert held[job].share is not None
            assert held[job].share.granted == pool.granted[job]
            assert held[job].share.closed == (job in closed)
        move = rng.random()
        if move < 0.1:  # its worker dies
            expire(url, held.pop(job).job_id)
            continue
        if move < 0.2 and await store.release(held[job], reason="shutdown", detail=""):
            del held[job]
            continue
        tokens = rng.randint(0, pool.granted[job] - spent[job])
        if tokens:
            await store.commit(held[job], [spend(f"{job}{step}", tokens)])
            spent[job] += tokens
        if move < 0.7 and job not in closed:
            ask = TokenRequest(rng.randint(1, 60), rng.choice([0.0, 0.3, rng.random()]))
            share = await batches.wait_for_budget(held[job], ask)
            ready.discard(job)
            dealt = pool.request(job, ask)
            assert (share is None) == (job not in dealt)
            if share is None:
                assert await store.claim(job, lease=60, max_attempts=100, worker="w") is None or job in dealt
                del held[job]
        else:
            if move < 0.8:
                await store.cancel(job)
            await store.finish(held.pop(job), "completed", result=RESULT)
            ready.discard(job)
            alive.discard(job)
            dealt = pool.end(job, spent[job])
        ready |= set(dealt)
        closed |= {name for name, more in dealt.items() if more == 0}
        batch = await batches.get(batch_id)
        assert batch["unassigned"] == pool.unassigned
        assert {one["id"]: one["granted"] for one in batch["jobs"]} == pool.granted
    assert not alive
    assert (await batches.get(batch_id))["status"] == "completed"
    assert sum(spent.values()) + pool.unassigned == budget


async def test_a_parked_job_waits_until_its_grant_wakes_it(store: JobStore, url: str) -> None:
    batch_id, (first, second) = await submit(store, 2, 800)
    one, two = await claim(store, first), await claim(store, second)
    await store.commit(one, [spend("a", 100)])
    assert await BatchStore(store).wait_for_budget(one, TokenRequest(50, 0.5)) is None  # the other job has its floor
    job = await store.get(first)
    assert (job["status"], job["attempt"]) == ("queued", 0)
    assert await store.claim(first, lease=60, max_attempts=3, worker="w") is None
    with redis.Redis.from_url(url) as client:
        assert client.zscore("reasoner:due", first) is None
    assert await store.commit(one, [spend("b", 1)]) == "lost"
    await store.finish(two, "completed", result=RESULT)
    assert (first, "batch") in await store.reap(3)
    again = await claim(store, first)
    assert again.share is not None
    assert again.share.granted == 150
    assert (await store.load_events(first))[-2].data["reason"] == "batch"
    assert (await BatchStore(store).get(batch_id))["unassigned"] == 800 - 150


async def test_a_grant_renews_the_lease(store: JobStore, url: str) -> None:
    _, (job_id,) = await submit(store, 1, 800)
    held = await claim(store, job_id)
    expire(url, job_id)
    assert await BatchStore(store).wait_for_budget(held, TokenRequest(50, 0.5)) is not None
    assert await store.reap(1) == []
    assert await store.claim(job_id, lease=60, max_attempts=100, worker="w") is None


async def test_parking_a_job_of_another_worker_raises(store: JobStore, url: str) -> None:
    _, (job_id, _) = await submit(store, 2, 800)
    held = await claim(store, job_id)
    expire(url, job_id)
    await claim(store, job_id)
    with pytest.raises(LeaseLost):
        await BatchStore(store).wait_for_budget(held, TokenRequest(50, 0.5))


async def test_cancelling_a_batch_ends_waiting_jobs_at_once_and_notifies_running_ones(store: JobStore) -> None:
    batch_id, jobs = await submit(store, 3, 900)
    running, parked = await claim(store, jobs[0]), await claim(store, jobs[1])
    await store.commit(parked, [solution("0", "2")])
    assert await BatchStore(store).wait_for_budget(parked, TokenRequest(5, 0.5)) is None
    batch = await BatchStore(store).cancel(batch_id)
    assert (batch["status"], batch["counts"]["cancelled"], batch["cancelled_at"]) == ("cancelling", 2, None)
    assert [job["answer"] for job in batch["jobs"]] == [None, "2", None]
    assert await store.heartbeat([running]) == ["cancel"]
    with pytest.raises(JobCancelled):
        await BatchStore(store).wait_for_budget(running, TokenRequest(5, 0.5))
    batch = await BatchStore(store).get(batch_id)
    assert (batch["status"], batch["counts"]["cancelled"]) == ("cancelled", 3)
    assert await BatchStore(store).cancel(batch_id) == batch
    with pytest.raises(NoSuchBatch):
        await BatchStore(store).cancel("batch_" + "0" * 32)


async def test_one_idempotency_key_creates_one_batch(store: JobStore) -> None:
    first, jobs = await submit(store, 2, 10, idempotency=("key", "digest"))
    assert await submit(store, 2, 10, idempotency=("key", "digest")) == (first, jobs)
    with pytest.raises(IdempotencyConflict):
        await submit(store, 2, 10, idempotency=("key", "other"))
    # Keys of jobs and of batches are separate.
    await store.submit(SPEC, owner="local", queue_cap=10, idempotency=("key", "other"))


async def test_a_batch_that_exceeds_the_queue_is_refused_completely(store: JobStore) -> None:
    await submit(store, 3, 10, queue_cap=5)
    with pytest.raises(QueueFull):
        await submit(store, 3, 10, queue_cap=5)
    assert len((await store.list_jobs(owner=None, after=None, limit=10)).jobs) == 3


@pytest.mark.parametrize(
    ("ends", "status", "num_failed"),
    [
        (["completed", "completed"], "completed", 0),
        (["completed", "cancelled"], "completed", 1),
        (["completed", "incomplete"], "completed", 0),
        (["completed", "failed"], "completed", 1),
        (["failed", "failed"], "completed", 2),
        (["failed", "cancelled"], "completed", 2),
        (["cancelled", "cancelled"], "cancelled", 2),
    ],
)
async def test_an_ended_batch_counts_the_jobs_with_and_without_an_answer(
    store: JobStore, ends: list[str], status: str, num_failed: int
) -> None:
    batch_id, jobs = await submit(store, 2, 10)
    for job_id, end in zip(jobs, ends, strict=True):
        assert (await BatchStore(store).get(batch_id))["status"] == "in_progress"
        if end == "cancelled":
            await store.cancel(job_id)
        else:
            await store.finish(await claim(store, job_id), end, result=RESULT if end == "completed" else None)
    batch = await BatchStore(store).get(batch_id)
    assert (batch["status"], batch["request_counts"]) == (
        status,
        {"total": 2, "completed": 2 - num_failed, "failed": num_failed},
    )


async def test_pages_of_batches_are_newest_first(store: JobStore) -> None:
    ids = [(await submit(store, 1, 10))[0] for _ in range(5)]
    batches = BatchStore(store)
    first = await batches.list_batches(owner=None, after=None, limit=2)
    rest = await batches.list_batches(owner=None, after=first[-1]["id"], limit=10)
    assert [batch["id"] for batch in first + rest] == ids[::-1]
    with pytest.raises(NoSuchBatch):
        await batches.list_batches(owner=None, after="batch_" + "0" * 32, limit=2)


async def test_a_batch_is_deleted_with_the_last_of_its_jobs(store: JobStore, url: str) -> None:
    batch_id, jobs = await submit(store, 2, 10)
    with pytest.raises(JobActive):
        await store.delete(jobs[0])
    await BatchStore(store).cancel(batch_id)
    await store.delete(jobs[0])
    assert [job["id"] for job in (await BatchStore(store).get(batch_id))["jobs"]] == jobs[1:]
    await store.delete(jobs[1])
    with pytest.raises(NoSuchBatch):
        await BatchStore(store).get(batch_id)
    with redis.Redis.from_url(url) as client:
        assert not client.keys("reasoner:batch:*")


@pytest.mark.parametrize(("die", "seed"), mostly_long_grid([True, False], range(3), every=5))
async def test_workers_finish_a_batch_within_its_budget_even_if_they_die(
    store: JobStore, url: str, seed: int, die: bool
) -> None:
    """Several workers run all due jobs, as wake-ups would make them; with ``die``, engines fail repeatedly."""
    rng, budget = random.Random(shift(seed)), 2500
    names = ["weighted_vote", "best_of_n", "self_consistency", "beam", "greedy"]
    specs = []
    for number in range(2 * MAX_ACTIVE_JOBS):
        strategy = {"name": names[number % 5]} | ({} if names[number % 5] == "greedy" else {"n": 6})
        specs.append(build_spec({"problem": f"{number}?", "strategy": strategy, "seed": number}).model_dump())
    made, _ = await BatchStore(store).submit(specs, {"tokens": budget}, {}, owner="local", queue_cap=1000)
    engines: list[ScriptedEngine] = []

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        engines.append(ScriptedEngine(order=rng.randrange(999), die_after=rng.randrange(9) if die else None))
        return await run_job(spec, engines[-1], journal, cancelled=cancelled)

    while (await BatchStore(store).get(made["id"]))["status"] == "in_progress":
        with redis.Redis.from_url(url) as client:
            for job_id in client.zrange("reasoner:due", 0, -1):
                client.zadd("reasoner:due", {job_id: 1})
        due = [job_id for job_id, _ in await store.reap(3)]
        assert due
        await asyncio.gather(*(wake(store, job_id, run) for job_id in due))
    batch = await BatchStore(store).get(made["id"])
    assert batch["counts"]["completed"] + batch["counts"]["incomplete"] == len(specs)
    assert sum(engine.total for engine in engines) >= batch["usage"]["generated"]
    assert BatchUsage.model_validate(batch["usage"]).total + batch["unassigned"] == budget
    for job in batch["jobs"]:
        journal = await store.load_entries(job["id"])
        assert sum(entry.spend.total for entry in journal) == job["tokens"] <= job["granted"]
    granted = [job["granted"] for job in batch["jobs"]]
    assert max(granted) > min(granted)


async def wake(store: JobStore, job_id: str, run: RunJob) -> None:
    async with asyncio.timeout(60):
        await execute(
            job_id,
            store=store,
            engine=ScriptedEngine(),
            run=run,
            shutting_down=asyncio.Event(),
            leases=Leases(store, 5),
            claims=ClaimQueue(store, lease=5, max_attempts=3),
        )
