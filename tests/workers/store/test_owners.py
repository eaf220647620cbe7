"""Ownership of jobs and batches: other owners cannot find them."""

from __future__ import annotations

import random

import pytest

from tests.seeds import shift
from tests.workers.store.helpers import SPEC, claim, submit
from tests.workers.store.test_batches import submit as submit_batch
from workers.archive.filters import JobFilter
from workers.store.batches import BatchStore, NoSuchBatch
from workers.store.jobs import IdempotencyConflict, JobStore, NoSuchJob

OWNERS = ("ann", "bob", "cem")


async def walk(store: JobStore, owner: str | None, status: str | None = None) -> list[str]:
    seen: list[str] = []
    while page := (
        await store.list_jobs(JobFilter(status), owner=owner, after=seen[-1] if seen else None, limit=2)
    ).jobs:
        seen += [job["id"] for job in page]
    return seen


async def test_a_job_is_visible_to_its_owner_and_to_admins(store: JobStore) -> None:
    job_id = await submit(store, owner="ann")
    await store.check_owner(job_id, "ann")
    await store.check_owner(job_id, None)
    for stranger in ("bob", "an", "ann:queued", ""):
        with pytest.raises(NoSuchJob):
            await store.check_owner(job_id, stranger)
    with pytest.raises(NoSuchJob):
        await store.check_owner("job_" + "0" * 32, "ann")


async def test_a_claim_contains_the_owner(store: JobStore) -> None:
    _, [of_batch] = await submit_batch(store, 1, 10, owner="bob")
    for owner, job_id in (("ann", await submit(store, owner="ann")), ("bob", of_batch)):
        assert (await claim(store, job_id)).owner == owner


async def test_lists_contain_the_jobs_of_the_owner_in_every_status(store: JobStore) -> None:
    draw, owner_of, status_of = random.Random(shift(3)), {}, {}
    for _ in range(24):
        owner = draw.choice(OWNERS)
        job_id = await submit(store, owner=owner)
        owner_of[job_id], status_of[job_id] = owner, "queued"
        fate = draw.choice(("queued", "in_progress", "failed", "cancelled", "deleted"))
        if fate in ("in_progress", "failed"):
            held = await claim(store, job_id)
            if fate == "failed":
                await store.finish(held, "failed")
        elif fate in ("cancelled", "deleted"):
            await store.cancel(job_id)
        if fate == "deleted":
            await store.delete(job_id)
            del owner_of[job_id], status_of[job_id]
        else:
            status_of[job_id] = fate
    newest_first = list(owner_of)[::-1]
    for owner in OWNERS:
        mine = [job_id for job_id in newest_first if owner_of[job_id] == owner]
        assert await walk(store, owner) == mine
        for status in ("queued", "in_progress", "failed", "cancelled"):
            assert await walk(store, owner, status) == [job_id for job_id in mine if status_of[job_id] == status]
    assert await walk(store, None) == newest_first


async def test_a_cursor_of_another_owner_is_invalid(store: JobStore) -> None:
    job_id = await submit(store, owner="ann")
    batch_id, _ = await submit_batch(store, 1, 10, owner="ann")
    with pytest.raises(NoSuchJob):
        await store.list_jobs(owner="bob", after=job_id, limit=9)
    with pytest.raises(NoSuchBatch):
        await BatchStore(store).list_batches(owner="bob", after=batch_id, limit=9)


async def test_idempotency_keys_are_separate_for_each_owner(store: JobStore) -> None:
    ann, new = await store.submit(SPEC, owner="ann", queue_cap=10, idempotency=("key", "digest"))
    bob, also_new = await store.submit(SPEC, owner="bob", queue_cap=10, idempotency=("key", "other"))
    assert (new, also_new) == (True, True)
    assert ann["id"] != bob["id"]
    again, _ = await store.submit(SPEC, owner="ann", queue_cap=10, idempotency=("key", "digest"))
    assert again["id"] == ann["id"]
    with pytest.raises(IdempotencyConflict):
        await store.submit(SPEC, owner="bob", queue_cap=10, idempotency=("key", "digest"))


async def test_a_batch_and_its_jobs_have_one_owner(store: JobStore) -> None:
    batches = BatchStore(store)
    batch_id, jobs = await submit_batch(store, 2, 10, owner="ann")
    await batches.check_owner(batch_id, "ann")
    with pytest.raises(NoSuchBatch):
        await batches.check_owner(batch_id, "bob")
    assert await walk(store, "ann") == jobs[::-1]
    assert [batch["id"] for batch in await batches.list_batches(owner="ann", after=None, limit=9)] == [batch_id]
    assert await batches.list_batches(owner="bob", after=None, limit=9) == []
    await batches.cancel(batch_id)
    for job_id in jobs:
        await store.delete(job_id)
    assert await batches.list_batches(owner="ann", after=None, limit=9) == []
    assert await walk(store, "ann") == []
