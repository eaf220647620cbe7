"""Dead-lettered jobs and their retries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import redis

from engine.protocol.types import EngineClient
from reasoner.jobs.job import JobError
from reasoner.jobs.journal import Entry, Journal, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.workers.store.helpers import RESULT, claim, entry, expire, submit, types
from tests.workers.store.test_batches import submit as submit_batch
from workers.archive.filters import DEAD, JobFilter
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.batches import BatchStore
from workers.store.claims import Claim
from workers.store.jobs import JobStore, NoSuchJob, NotRetryable, QueueFull


async def give_up(store: JobStore, url: str, job_id: str, *, wrote: int = 2) -> None:
    """Make a job lose its worker for good after ``wrote`` entries."""
    held: Claim | None = await claim(store, job_id)
    await store.commit(held, [entry(f"k{index}") for index in range(wrote)])
    while held is not None:
        expire(url, job_id)
        held = await store.claim(job_id, lease=60, max_attempts=3, worker="w")


async def dead(store: JobStore) -> list[str]:
    return [job["id"] for job in (await store.list_jobs(JobFilter(DEAD), owner=None, after=None, limit=10)).jobs]


async def test_a_dead_job_is_listed_with_its_reason_and_an_ordinary_failure_is_not(store: JobStore, url: str) -> None:
    poison, wrong = await submit(store), await submit(store)
    await give_up(store, url, poison)
    await store.finish(await claim(store, wrong), "failed", error=JobError(code="engine_error", message="no"))
    (found,) = (await store.list_jobs(JobFilter(DEAD), owner=None, after=None, limit=10)).jobs
    assert (found["id"], found["error"]["code"]) == (poison, "max_attempts")
    counts, _ = await store.get_stats()
    assert (counts["failed"], counts[DEAD]) == (2, 1)


async def test_a_retried_job_continues_from_its_journal_and_is_charged_once(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    await give_up(store, url, job_id)
    job = await store.retry(job_id, queue_cap=10)
    assert (job["status"], job["attempt"], job["error"], job["finished_at"]) == ("queued", 0, None, None)
    assert await dead(store) == []
    assert await store.reap(3) == [(job_id, "interactive")]
    held = await claim(store, job_id)
    assert (held.attempt, held.token) == (1, 5)
    assert [item.key for item in await store.load_entries(job_id)] == ["k0", "k1"]
    assert await store.commit(held, [entry("k1"), entry("k2")]) == "ok"
    await store.finish(held, "completed", result=RESULT)
    job = await store.get(job_id)
    assert (job["status"], job["usage"]["generated"]) == ("completed", 9)
    assert (await types(store, job_id))[-5:] == ["job.failed", "job.queued", "job.resumed", "node", "job.completed"]
    with redis.Redis.from_url(url) as client:
        assert not client.exists(f"reasoner:job:{job_id}:keys")


BEAM = build_spec(
    {"problem": "1 + 1?", "strategy": {"name": "beam", "n": 8, "expansions": 2}, "budget": {"tokens": 2000}, "seed": 5}
    | {"model": "policy"}
)


class Killed(BaseException):
    """Do nothing more, like a worker that has died."""


class Dying:
    """Journal whose worker dies before one of its writes."""

    def __init__(self, journal: Journal, writes: int) -> None:
        self._journal, self._left = journal, writes
        self.job_id, self.grant_source = journal.job_id, journal.grant_source

    async def load(self) -> list[Entry]:
        return await self._journal.load()

    async def append(self, entries: Sequence[Entry]) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1
        await self._journal.append(entries)


async def test_a_dead_lettered_search_that_is_retried_gives_the_undisturbed_result(store: JobStore, url: str) -> None:
    engine, runs = ScriptedEngine(), 0

    async def wake(job_id: str, *, writes: int = 1000) -> None:
        async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
            nonlocal runs
            runs += 1
            return await run_job(spec, engine, Dying(journal, writes), cancelled=cancelled)

        await execute(
            job_id,
            store=store,
            engine=engine,
            run=run,
            shutting_down=asyncio.Event(),
            leases=Leases(store, 60),
            claims=ClaimQueue(store, lease=60, max_attempts=3),
        )

    job, _ = await store.submit(BEAM.model_dump(), owner="o", queue_cap=10)
    job_id = str(job["id"])
    for writes in (2, 0, 0, 2, 0, 0, 0):  # it progresses at first, then stops progressing
        assert await dead(store) == []
        with pytest.raises(Killed):
            await wake(job_id, writes=writes)
        expire(url, job_id)
    await wake(job_id)
    assert await dead(store) == [job_id]
    journaled = await store.load_entries(job_id)
    assert len(journaled) >= 2 * 2
    await store.retry(job_id, queue_cap=10)
    engine.generated.clear()
    await wake(job_id)
    assert runs == 8

    undisturbed = ScriptedEngine()
    outcome = await run_job(BEAM, undisturbed, MemoryJournal())
    job = await store.get(job_id)
    assert (job["status"], job["result"]) == ("completed", outcome.result.model_dump())
    assert (await store.load_entries(job_id))[: len(journaled)] == journaled
    # The last attempt generated only what the journal lacked.
    held = sum(item.spend.generated for item in journaled)
    assert len(engine.generated) + held == len(undisturbed.generated) == job["usage"]["generated"]


async def test_a_retried_poison_job_is_dead_lettered_again(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    for _ in range(2):
        await give_up(store, url, job_id)
        assert await dead(store) == [job_id]
        await store.retry(job_id, queue_cap=10)


async def test_only_failed_jobs_are_retried_and_only_if_the_queue_has_room(store: JobStore, url: str) -> None:
    waiting = await submit(store)
    with pytest.raises(NotRetryable, match="queued"):
        await store.retry(waiting, queue_cap=10)
    held = await claim(store, waiting)
    await store.finish(held, "completed", result=RESULT)
    with pytest.raises(NotRetryable, match="completed"):
        await store.retry(waiting, queue_cap=10)
    failed = await submit(store)
    await give_up(store, url, failed)
    await submit(store)
    with pytest.raises(QueueFull):
        await store.retry(failed, queue_cap=1)
    with pytest.raises(NoSuchJob):
        await store.retry("job_" + "0" * 32, queue_cap=10)


async def test_followers_of_a_retried_job_get_both_runs_in_one_stream(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    await give_up(store, url, job_id)
    first = [event.type async for event in store.follow(job_id)]
    assert first[-1] == "job.failed"
    await store.retry(job_id, queue_cap=10)

    async def read() -> list[int]:
        return [event.seq async for event in store.follow(job_id)]

    following = asyncio.create_task(read())
    await store.finish(await claim(store, job_id), "completed", result=RESULT)
    assert await following == list(range(1, len(first) + 4))


async def test_a_deleted_dead_job_leaves_nothing(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    await give_up(store, url, job_id)
    await store.delete(job_id)
    with redis.Redis.from_url(url) as client:
        assert not {key for key in client.keys("reasoner:*") if job_id.encode() in key}
        left = {
            key for key in client.keys("reasoner:*") if not key.startswith(b"reasoner:shares")
        }  # of owners, not of jobs
        assert {client.type(key) for key in left} <= {b"string", b"hash"}  # counters


@pytest.mark.parametrize("left", ["enough", "too little", "cancelled"])
async def test_a_retried_job_of_a_batch_keeps_only_its_granted_tokens(store: JobStore, url: str, left: str) -> None:
    batches = BatchStore(store)
    batch_id, (poison, other) = await submit_batch(store, 2, 80)
    await give_up(store, url, poison)  # granted 10, spent 6
    assert (await batches.get(batch_id))["unassigned"] == 64
    if left == "too little":
        with redis.Redis.from_url(url) as client:
            client.hset(f"reasoner:batch:{batch_id}", "pool", 3)
    if left == "cancelled":
        await batches.cancel(batch_id)
    if left != "enough":
        with pytest.raises(NotRetryable, match="batch"):
            await store.retry(poison, queue_cap=10)
        return
    await store.retry(poison, queue_cap=10)
    assert (await batches.get(batch_id))["unassigned"] == 60
    for job_id in (poison, other):
        await store.finish(await claim(store, job_id), "completed", result=RESULT)
    ended = await batches.get(batch_id)
    assert (ended["status"], ended["unassigned"], ended["counts"]["completed"]) == ("completed", 74, 2)
