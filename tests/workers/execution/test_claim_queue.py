"""Claims that arrive together share one request to the broker, and each takes another job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.workers.store.helpers import submit
from workers.execution.claim_queue import MAX_CLAIMS, ClaimQueue
from workers.store.jobs import JobStore


async def test_claims_that_arrive_meanwhile_share_a_script_and_take_one_job_each(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, sent, claim_all = list[int](), asyncio.Event(), store.claim_all

    async def count(job_ids: list[str], **options: Any) -> Any:
        sizes.append(len(job_ids))
        sent.set()
        return await claim_all(job_ids, **options)

    monkeypatch.setattr(store, "claim_all", count)
    jobs = [await submit(store) for _ in range(2 * MAX_CLAIMS)]
    queue = ClaimQueue(store, lease=60, max_attempts=3)
    first = asyncio.create_task(queue.claim(jobs[0]))
    await sent.wait()
    others = [asyncio.create_task(queue.claim(job_id)) for job_id in jobs[1:] + jobs[:3]]
    claims = await asyncio.gather(first, *others)
    taken = [claim.job_id for claim in claims if claim is not None]
    assert taken == jobs, "in order of submission, and each once"
    assert claims[len(jobs) :] == [None] * 3, "there are no more jobs than these"
    assert sizes == [1, MAX_CLAIMS, MAX_CLAIMS, 2]


async def test_a_broker_that_fails_fails_the_claims_of_its_script_and_no_later_ones(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [await submit(store) for _ in range(3)]
    queue, claim_all = ClaimQueue(store, lease=60, max_attempts=3), store.claim_all

    async def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the broker is away")

    monkeypatch.setattr(store, "claim_all", fail)
    outcomes = await asyncio.gather(*(queue.claim(job_id) for job_id in jobs), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ConnectionError] * 3
    monkeypatch.setattr(store, "claim_all", claim_all)
    claims = await asyncio.gather(*(queue.claim(job_id) for job_id in jobs))
    assert [claim and claim.job_id for claim in claims] == jobs


async def test_a_claim_whose_waiter_was_cancelled_keeps_no_other_from_its_own(store: JobStore) -> None:
    jobs = [await submit(store) for _ in range(2)]
    queue = ClaimQueue(store, lease=60, max_attempts=3)
    cancelled, kept = (asyncio.create_task(queue.claim(job_id)) for job_id in jobs)
    await asyncio.sleep(0)
    cancelled.cancel()
    claim = await kept
    assert claim is not None
    assert claim.job_id == jobs[1]
