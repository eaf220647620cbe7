"""Moving jobs to the archive: what is read afterwards is what was read before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.archive.helpers import end, find_places, list_ids, make_ended, submit_job
from tests.workers.store.helpers import SPEC, claim, entry, submit
from workers.archive.archive import Archive
from workers.archive.filters import DEAD, JobFilter
from workers.broker.archiver import Archiver
from workers.store.batches import BatchStore, NoSuchBatch
from workers.store.jobs import JobStore, NoSuchJob, NotRetryable

FAR = 4e9


async def test_a_job_is_the_same_before_and_after_its_move(
    store: JobStore, archive: Archive, archiver: Archiver
) -> None:
    ids = [await make_ended(store), await make_ended(store, "failed", metadata={"k": "v"})]
    job, _ = await store.submit(SPEC, owner="her", queue_cap=9, form='{"a": 1}')
    ids.append(job["id"])
    await store.cancel(job["id"])

    async def read() -> list[object]:
        documents = [await store.get(job_id) for job_id in ids]
        events = [await store.load_events(job_id) for job_id in ids]
        streams = [[event async for event in store.follow(job_id, 1)] for job_id in ids]
        owners = [(await store.get_owner(job_id), await store.get_form(job_id)) for job_id in ids]
        ended = [job_id async for job_id in store.iterate_ended(None, 0, FAR)]
        return [documents, events, streams, owners, ended, await list_ids(store), await list_ids(store, "her")]

    before = await read()
    assert await archiver.move() == 3
    assert [await find_places(store, archive, job_id) for job_id in ids] == [(False, True)] * 3
    assert await read() == before
    assert await store.command("KEYS", "reasoner:job:*") == []
    assert await archiver.move() == 0


async def test_only_settled_jobs_are_moved(store: JobStore, archive: Archive, archiver: Archiver) -> None:
    waiting, running = await submit_job(store), await submit_job(store)
    await claim(store, running)
    told = await make_ended(store, webhook="https://example.com/hook")
    ended = await make_ended(store)
    await archiver.move()
    places = [await find_places(store, archive, job_id) for job_id in (waiting, running, told, ended)]
    assert places == [(True, False), (True, False), (True, False), (False, True)]
    await store.command("ZREM", "reasoner:webhooks", told)
    await archiver.move()
    assert await find_places(store, archive, told) == (False, True)


async def test_a_job_that_cannot_be_archived_stays_and_keeps_no_other(
    store: JobStore, archive: Archive, archiver: Archiver
) -> None:
    odd, whole = await make_ended(store), await make_ended(store)
    await store.command("HSET", f"reasoner:job:{odd}", "finished", "soon")
    for _ in range(2):
        await archiver.move()
        assert await find_places(store, archive, whole) == (False, True)
        assert await archive.load_entries(odd) is None
        assert await store.command("HGET", f"reasoner:job:{odd}", "finished") == "soon"


async def test_a_process_that_was_killed_between_its_passes_keeps_no_other_from_moving_jobs(
    store: JobStore, archive: Archive, archiver: Archiver
) -> None:
    other = Archiver(store, archive, age=0.0, retention=1e6)
    await archiver.move()  # finds nothing
    ids = [await make_ended(store)]
    assert await other.move() == 1
    ids.append(await make_ended(store))
    assert await archiver.move() == 1
    assert [await find_places(store, archive, job_id) for job_id in ids] == [(False, True)] * 2


async def test_one_process_moves_jobs_at_a_time(
    store: JobStore, archive: Archive, archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Archiver(store, archive, age=0.0, retention=1e6)
    job_id, save, beside = await make_ended(store), archive.save, list[int]()

    async def try_beside(*arguments: Any, number: int) -> bool:
        beside.append(await other.move())
        return await save(*arguments, number=number)

    monkeypatch.setattr(archive, "save", try_beside)
    assert await archiver.move() == 1
    assert beside == [0]
    assert await find_places(store, archive, job_id) == (False, True)


async def test_a_pass_that_was_halted_before_it_stored_jobs_changes_nothing_after_a_later_one(
    store: JobStore, archive: Archive, archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read that a job is active, which then ends and is moved: the job must not be removed from the archive."""
    job_id, save, read = await make_ended(store, "failed"), archive.save, store.read_record
    other = Archiver(store, archive, age=0.0, retention=1e6)
    active = await make_ended(store, "failed")

    async def read_active(read_id: str) -> Any:
        return None if read_id == active else await read(read_id)

    async def halt(records: Any, stale: Any, *, number: int) -> bool:
        monkeypatch.undo()
        await store.command("HSET", "reasoner:archiver", "till", 0)
        assert await other.move() == 2
        return await save(records, stale, number=number)

    monkeypatch.setattr(store, "read_record", read_active)
    monkeypatch.setattr(archive, "save", halt)
    await archiver.move()
    assert [await find_places(store, archive, each) for each in (job_id, active)] == [(False, True)] * 2


async def test_passes_go_on_after_redis_lost_its_data(store: JobStore, archive: Archive, archiver: Archiver) -> None:
    await make_ended(store)
    await archiver.move()
    await store.command("FLUSHALL")
    job_id = await make_ended(store)
    assert await Archiver(store, archive, age=0.0, retention=1e6).move() == 1
    assert await find_places(store, archive, job_id) == (False, True)


async def test_a_list_has_the_jobs_of_both_stores_in_order_on_every_page(store: JobStore, archiver: Archiver) -> None:
    ids = [await submit_job(store) for _ in range(9)]
    for job_id in ids[::2]:
        await end(store, job_id)
    await archiver.move()
    for job_id in ids[1::4]:
        await end(store, job_id)

    async def walk(status: str | None, limit: int) -> list[str]:
        seen: list[str] = []
        while True:
            page = await store.list_jobs(
                JobFilter(status), owner="local", after=seen[-1] if seen else None, limit=limit
            )
            seen += [job["id"] for job in page.jobs]
            if not page.has_more:
                return seen

    for limit in (1, 2, 4, 9):
        assert await walk(None, limit) == ids[::-1]
        assert await walk("queued", limit) == ids[3::4][::-1]
        assert await walk("completed", limit) == [job_id for job_id in ids[::-1] if job_id not in ids[3::4]]
    assert await list_ids(store, "her") == []
    with pytest.raises(NoSuchJob):
        await store.list_jobs(owner="her", after=ids[0], limit=2)


async def test_a_job_of_the_archive_is_deleted_for_good(store: JobStore, archive: Archive, archiver: Archiver) -> None:
    kept, dropped = await make_ended(store), await make_ended(store)
    await archiver.move()
    await store.delete(dropped)
    for read in (store.get(dropped), store.delete(dropped), store.get_owner(dropped)):
        with pytest.raises(NoSuchJob):
            await read
    assert await store.load_events(dropped) == []
    assert await list_ids(store) == [kept]
    assert await archive.load_entries(dropped) is None


async def test_a_failed_job_of_the_archive_is_retried_with_its_journal(
    store: JobStore, archive: Archive, archiver: Archiver
) -> None:
    job_id, done = await make_ended(store, "failed"), await make_ended(store)
    await archiver.move()
    assert (await store.retry(job_id, queue_cap=9))["status"] == "queued"
    assert await list_ids(store) == [done, job_id]
    assert (await store.list_jobs(JobFilter("failed"), owner=None, after=None, limit=9)).jobs == []
    assert [job_id async for job_id in store.iterate_ended(None, 0, FAR)] == [done]
    held = await claim(store, job_id)
    assert [item.key for item in await store.load_entries(job_id)] == ["a", "é\n\x00"]
    await store.commit(held, [entry("a"), entry("b")])  # the first is in the journal already
    assert (await store.get(job_id))["usage"]["generated"] == 10
    await archiver.move()
    assert await find_places(store, archive, job_id) == (True, False)
    await store.finish(held, "completed")
    await archiver.move()
    assert await find_places(store, archive, job_id) == (False, True)
    assert (await store.get(job_id))["status"] == "completed"
    with pytest.raises(NotRetryable, match="only a failed job can be retried, and this one is completed"):
        await store.retry(done, queue_cap=9)


async def test_a_job_that_changed_while_it_was_moved_is_as_redis_has_it(
    store: JobStore, archive: Archive, archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    retried, deleted = await make_ended(store, "failed"), await make_ended(store)
    save = archive.save

    async def change(*args: Any, number: int) -> bool:
        await store.delete(deleted)
        is_stored = await save(*args, number=number)
        await store.retry(retried, queue_cap=9)
        return is_stored

    with monkeypatch.context() as patch:
        patch.setattr(archive, "save", change)
        await archiver.move()
    assert await find_places(store, archive, deleted) == (False, True)  # until the next pass
    assert await list_ids(store) == [retried]
    with pytest.raises(NoSuchJob):
        await store.get(deleted)
    await archiver.move()
    assert await find_places(store, archive, deleted) == (False, False)
    assert await list_ids(store) == [retried]
    assert await find_places(store, archive, retried) == (True, False)
    assert (await store.get(retried))["status"] == "queued"
    assert await store.command("HLEN", "reasoner:archiving") == 0


async def test_a_batch_shows_its_moved_jobs_and_ends_with_the_last_one(store: JobStore, archiver: Archiver) -> None:
    batches = BatchStore(store)
    batch, _ = await batches.submit([SPEC, SPEC], {"tokens": 100}, {}, owner="local", queue_cap=9)
    ids = [job["id"] for job in batch["jobs"]]
    for job_id in ids:
        await end(store, job_id)
    before = await batches.get(batch["id"])
    await archiver.move()
    assert await batches.get(batch["id"]) == before
    await store.delete(ids[0])
    assert [job["id"] for job in (await batches.get(batch["id"]))["jobs"]] == ids[1:]
    await store.delete(ids[1])
    with pytest.raises(NoSuchBatch):
        await batches.get(batch["id"])


async def test_an_idempotency_key_outlasts_the_move_of_its_job(store: JobStore, archiver: Archiver) -> None:
    job_id = await submit(store, idempotency=("key", "digest"))
    await store.cancel(job_id)
    await archiver.move()
    assert await submit(store, idempotency=("key", "digest")) == job_id
    found = await store.find_repeated("local", ("key", "digest"))
    assert found is not None
    assert found["id"] == job_id
    await store.delete(job_id)
    assert await store.find_repeated("local", ("key", "digest")) is None
    assert await submit(store, idempotency=("key", "digest")) != job_id


async def test_archived_jobs_are_deleted_after_the_retention_time(store: JobStore, archive: Archive) -> None:
    old, new = await make_ended(store), await make_ended(store)
    await Archiver(store, archive, age=0, retention=1e6).move()
    finished = (await store.get(new))["finished_at"]
    archiver = Archiver(store, archive, age=0, retention=await store.get_broker_time() - finished)
    await store.command("DEL", "reasoner:archiver")
    await archiver.move()
    assert old not in await list_ids(store)


async def test_a_dead_job_stays_listed_as_dead(store: JobStore, archiver: Archiver) -> None:
    job_id = await make_ended(store, "failed")
    reason = '{"code":"max_attempts","message":"lost"}'
    await store.command("HSET", f"reasoner:job:{job_id}", "error", reason)
    await make_ended(store, "failed")
    await archiver.move()
    found = (await store.list_jobs(JobFilter(DEAD), owner=None, after=None, limit=9)).jobs
    assert [job["id"] for job in found] == [job_id]


async def test_new_jobs_come_behind_archived_ones_after_redis_lost_its_data(
    store: JobStore, archive: Archive, archiver: Archiver
) -> None:
    ids = [await make_ended(store) for _ in range(3)]
    await archiver.move()
    await store.command("FLUSHALL")
    early = await make_ended(store)  # before any process has reached the archive
    restarted = Archiver(store, archive, age=0, retention=1e6)
    await restarted.move()
    late = await make_ended(store)
    await restarted.move()
    assert sorted(await list_ids(store)) == sorted([*ids, early, late])
    assert (await list_ids(store))[0] == late
