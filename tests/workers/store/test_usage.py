"""Usage by owner and day: what ended jobs have spent, each token once."""

from __future__ import annotations

import random
from datetime import UTC, datetime

from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobError
from reasoner.jobs.journal import Entry
from tests.seeds import shift
from tests.workers.store.helpers import claim, submit
from workers.store.jobs import JobStore
from workers.store.reaping import DailyUsage

ERROR = JobError(code="engine", message="it failed")


def spend(key: str, tokens: int, cost: float) -> Entry:
    data = {"node": key, "tokens": tokens}
    return Entry(key, "node", data, Usage(generated=tokens, verifier_computed=1, cost=cost), 1.0)


async def test_each_owner_has_the_sum_of_its_ended_jobs_whatever_their_end_and_however_often_they_were_retried(
    store: JobStore,
) -> None:
    before = datetime.now(UTC).date()
    draw, expected = random.Random(shift(11)), dict[str, list[float]]()
    for _ in range(12):
        owner = draw.choice(("ann", "bob@example.org"))
        job_id, total = await submit(store, owner=owner), expected.setdefault(owner, [0, 0, 0.0])
        total[0] += 1
        for attempt in range(draw.randint(1, 3)):
            if attempt:
                await store.retry(job_id, queue_cap=1000)
            held, tokens, cost = await claim(store, job_id), draw.randint(1, 9), draw.random()
            await store.commit(held, [spend(f"k{attempt}", tokens, cost)])
            total[1] += tokens + 1
            total[2] += cost
            await store.finish(held, "failed", error=ERROR)
        await store.delete(job_id)
    running = await submit(store, owner="ann")
    await store.commit(await claim(store, running), [spend("k", 100, 1.0)])  # counted at its end
    if datetime.now(UTC).date() != before:
        return  # the days are two now
    rows = await store.get_usage(3)
    assert rows == sorted(rows, key=lambda row: row.owner)
    for row in rows:
        jobs, tokens, cost = expected[row.owner]
        assert (row.day, row.jobs, row.tokens) == (before.isoformat(), jobs, tokens)
        assert abs(row.cost - cost) <= 1e-12 * cost
    assert [row.owner for row in await store.get_usage(3, "ann")] == ["ann"]
    assert await store.get_usage(3, "an") == []


async def test_a_job_that_never_ran_costs_nothing(store: JobStore) -> None:
    job_id = await submit(store, owner="ann")
    await store.cancel(job_id)
    [row] = await store.get_usage(2)
    assert row == DailyUsage(day=row.day, owner="ann", jobs=1, tokens=0, cost=0.0)
