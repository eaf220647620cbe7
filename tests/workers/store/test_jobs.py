"""Jobs in the store, on a real server: claims, leases, the journal, cancellation, wake-ups and lists."""

from __future__ import annotations

import asyncio

import pytest
import redis

from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobError
from reasoner.jobs.journal import Entry
from tests.workers.store.helpers import (
    RESULT,
    SPEC,
    age_messages,
    claim,
    claim_again,
    entry,
    expire,
    solution,
    submit,
    types,
)
from workers.archive.filters import JobFilter
from workers.store.jobs import IdempotencyConflict, JobActive, JobStore, NoSuchJob, QueueFull
from workers.store.reaping import WakeupTemplates


async def test_a_job_goes_from_submission_to_its_result(store: JobStore) -> None:
    job_id = await submit(store)
    held = await claim(store, job_id)
    assert held.spec == SPEC
    assert await store.commit(held, [entry("a"), entry("b", 4)]) == "ok"
    assert await store.finish(held, "completed", result=RESULT)
    job = await store.get(job_id)
    assert (job["status"], job["attempt"], job["last_seq"]) == ("completed", 1, 5)
    assert job["usage"] == Usage(generated=7, seconds=0.5).model_dump()
    assert job["result"] == RESULT.model_dump()
    events = await store.load_events(job_id)
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]
    assert [event.type for event in events] == ["job.queued", "job.started", "node", "node", "job.completed"]
    assert events[-1].data["result"] == RESULT.model_dump()
    assert Usage.model_validate(events[-1].data["usage"]) == Usage(generated=7, seconds=0.5)


async def test_the_journal_returns_the_committed_entries(store: JobStore) -> None:
    held = await claim(store, await submit(store))
    entries = [
        Entry("é\n\x00", "node", {"text": "½ 😀 \u2028", "nested": [1, [], {}, None, 1e-9]}, Usage(), 0.1 + 0.2),
        Entry("k", "score", {"score": 0.1}, Usage(verifier_computed=5, flops=1.2345678901234e25), 1e6),
    ]
    await store.commit(held, entries)
    assert await store.load_entries(held.job_id) == entries


async def test_a_repeated_commit_is_written_and_billed_once(store: JobStore) -> None:
    held = await claim(store, await submit(store))
    await store.commit(held, [entry("a")])
    assert await store.commit(held, [entry("a"), entry("b")]) == "ok"
    assert [item.key for item in await store.load_entries(held.job_id)] == ["a", "b"]
    assert (await store.get(held.job_id))["usage"]["generated"] == 6


async def test_large_counts_are_billed_exactly(store: JobStore) -> None:
    held = await claim(store, await submit(store))
    await store.commit(held, [Entry("a", "node", {}, Usage(prompt=2**53 - 1, generated=1), 0.0)])
    await store.commit(held, [Entry("b", "node", {}, Usage(prompt=1, generated=1), 0.0)])
    usage = (await store.get(held.job_id))["usage"]
    assert (usage["prompt"], usage["generated"]) == (2**53, 2)


async def test_a_duplicate_message_of_a_running_job_does_nothing(store: JobStore) -> None:
    held = await claim(store, await submit(store))
    assert await store.claim(held.job_id, lease=60, max_attempts=3, worker="w2") is None
    await store.finish(held, "completed", result=RESULT)
    assert await store.claim(held.job_id, lease=60, max_attempts=3, worker="w2") is None
    assert await store.claim("job_" + "0" * 32, lease=60, max_attempts=3, worker="w2") is None


async def test_a_worker_with_a_lost_lease_can_write_nothing(store: JobStore, url: str) -> None:
    zombie = await claim(store, await submit(store))
    await store.commit(zombie, [entry("a")])
    expire(url, zombie.job_id)
    heir = await claim(store, zombie.job_id, "w2")
    assert (heir.attempt, heir.token) == (2, 2)
    assert await store.commit(zombie, [entry("b")]) == "lost"
    assert await store.heartbeat([zombie]) == ["lost"]
    assert not await store.finish(zombie, "completed", result=RESULT)
    assert not await store.release(zombie, reason="shutdown", detail="")
    assert await types(store, zombie.job_id) == ["job.queued", "job.started", "node", "job.resumed"]
    assert await store.commit(heir, [entry("b")]) == "ok"


@pytest.mark.parametrize("sign", ["heartbeat", "commit"])
async def test_a_slow_worker_keeps_its_job_with_its_next_write_or_heartbeat(
    store: JobStore, url: str, sign: str
) -> None:
    held = await claim(store, await submit(store))
    expire(url, held.job_id)
    if sign == "heartbeat":
        assert await store.heartbeat([held]) == ["ok"]
    else:
        assert await store.commit(held, [entry("a")]) == "ok"
    assert await store.reap(1) == []
    assert await store.claim(held.job_id, lease=60, max_attempts=3, worker="w2") is None


async def test_a_job_that_kills_its_workers_is_dead_lettered(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    for attempt in (1, 2, 3):
        assert (await claim(store, job_id)).attempt == attempt
        expire(url, job_id)
    assert await store.claim(job_id, lease=60, max_attempts=3, worker="w") is None
    job = await store.get(job_id)
    assert (job["status"], job["error"]["code"]) == ("failed", "max_attempts")


@pytest.mark.parametrize("way", ["claimed", "reaped"])
async def test_a_job_with_progress_between_worker_deaths_is_not_dead_lettered(
    store: JobStore, url: str, way: str
) -> None:
    job_id = await submit(store)
    for attempt in range(1, 9):
        held = await claim(store, job_id)
        assert (held.attempt, held.token) == (attempt, attempt)
        if attempt % 3 == 0:
            await store.commit(held, [entry(f"k{attempt}")])
        expire(url, job_id)
        if way == "reaped":
            assert await store.reap(3) == [(job_id, "interactive")]
    assert (await store.get(job_id))["attempt"] == 8
    await store.commit(await claim(store, job_id), [entry("k3")])  # already in the journal, so no progress
    expire(url, job_id)
    assert await store.reap(3) == []
    error = (await store.get(job_id))["error"]
    assert error["code"] == "max_attempts"
    assert "3 times in a row" in error["message"]


@pytest.mark.parametrize("wrote", [True, False])
async def test_releasing_a_job_keeps_the_count_of_earlier_attempts(store: JobStore, url: str, wrote: bool) -> None:
    job_id = await submit(store)
    for _ in range(2):
        await claim_again(store, url, job_id)
    for _ in range(5):
        held = await claim_again(store, url, job_id)
        if wrote:
            await store.commit(held, [entry("k")])
        await store.release(held, reason="shutdown", detail="")
    for _ in range(3 if wrote else 1):
        await claim_again(store, url, job_id)
    expire(url, job_id)
    assert await store.reap(3) == []
    assert (await store.get(job_id))["status"] == "failed"


async def test_the_reaper_dead_letters_a_job_without_any_worker(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    await claim(store, job_id)
    expire(url, job_id)
    assert await store.reap(max_attempts=1) == []
    assert (await store.get(job_id))["error"]["code"] == "max_attempts"


async def test_releasing_a_job_does_not_use_up_an_attempt(store: JobStore) -> None:
    job_id = await submit(store)
    for _ in range(5):
        held = await claim(store, job_id)
        assert held.attempt == 1
        assert await store.release(held, reason="shutdown", detail="the worker was asked to stop")
        assert (await store.get(job_id))["status"] == "queued"
    assert await store.reap(3) == [(job_id, "interactive")]


async def test_waiting_for_an_engine_is_reported_once_and_so_is_its_end(store: JobStore) -> None:
    job_id = await submit(store)
    for _ in range(3):
        held = await claim(store, job_id)
        await store.release(held, reason="engine_unavailable", detail="gone", delay=0)
    held = await claim(store, job_id)
    await store.commit(held, [entry("a")])
    assert await types(store, job_id) == ["job.queued", "job.started", "job.queued", "job.resumed", "node"]
    assert (await store.load_events(job_id))[2].data == {"reason": "engine_unavailable", "detail": "gone"}


async def test_a_waiting_job_is_cancelled_at_once(store: JobStore) -> None:
    job_id = await submit(store)
    assert (await store.cancel(job_id))["status"] == "cancelled"
    assert await store.claim(job_id, lease=60, max_attempts=3, worker="w") is None
    assert (await store.cancel(job_id))["last_seq"] == 2


async def test_a_running_job_is_notified_of_its_cancellation_and_its_last_spend_is_committed(store: JobStore) -> None:
    held = await claim(store, await submit(store))
    assert (await store.cancel(held.job_id))["status"] == "in_progress"
    assert await store.heartbeat([held]) == ["cancel"]
    assert await store.commit(held, [entry("a")]) == "cancel"
    assert await store.finish(held, "cancelled")
    job = await store.get(held.job_id)
    assert (job["status"], job["usage"]["generated"]) == ("cancelled", 3)


@pytest.mark.parametrize("how", ["released", "reaped", "claimed"])
async def test_a_cancelled_job_whose_worker_died_still_ends(store: JobStore, url: str, how: str) -> None:
    held = await claim(store, await submit(store))
    await store.cancel(held.job_id)
    if how == "released":
        await store.release(held, reason="shutdown", detail="")
    else:
        expire(url, held.job_id)
    if how == "reaped":
        assert await store.reap(3) == []
    if how == "claimed":
        assert await store.claim(held.job_id, lease=60, max_attempts=3, worker="w") is None
    assert (await store.get(held.job_id))["status"] == "cancelled"


@pytest.mark.parametrize("how", ["handed back", "released", "reaped", "claimed"])
async def test_a_cancelled_job_without_a_worker_gets_the_result_of_its_journal(
    store: JobStore, url: str, how: str
) -> None:
    held = await claim(store, await submit(store))
    await store.commit(held, [solution("0", "2")])
    if how == "handed back":
        await store.release(held, reason="engine_unavailable", detail="gone", delay=0)
    await store.cancel(held.job_id)
    if how == "released":
        await store.release(held, reason="shutdown", detail="")
    elif how != "handed back":
        expire(url, held.job_id)
    if how == "reaped":
        await store.reap(3)
    if how == "claimed":
        assert await store.claim(held.job_id, lease=60, max_attempts=3, worker="w") is None
    job = await store.get(held.job_id)
    told = {
        "answer": "2",
        "answer_level": "strict",
        "text": "\\boxed{2}",
        "thought": None,
        "content": None,
        "tool_calls": [],
        "confidence": None,
        "votes": [],
        "abstained": None,
        "finish_reason": "cancelled",
        "note": None,
        "node": "0",
        "logprobs": None,
        "alternatives": [],
        "ranking": [],
        "usage_by_model": {},
    }
    assert (job["status"], job["result"], job["usage"]["generated"]) == ("cancelled", told, 5)
    assert (await store.load_events(held.job_id))[-1].data["result"] == told


async def test_a_job_cancelled_before_its_search_began_has_no_result(store: JobStore) -> None:
    assert (await store.cancel(await submit(store)))["result"] is None


async def test_a_failure_keeps_its_code_and_message(store: JobStore) -> None:
    held = await claim(store, await submit(store))
    await store.finish(held, "failed", error=JobError(code="engine_error", message='no "such" model'))
    assert (await store.get(held.job_id))["error"] == {"code": "engine_error", "message": 'no "such" model'}
    assert (await store.load_events(held.job_id))[-1].data["error"]["message"] == 'no "such" model'


async def test_one_idempotency_key_creates_one_job(store: JobStore) -> None:
    first, created = await store.submit(SPEC, owner="local", queue_cap=10, idempotency=("key", "digest"))
    again, created_again = await store.submit(SPEC, owner="local", queue_cap=10, idempotency=("key", "digest"))
    assert (first["id"], created, created_again) == (again["id"], True, False)
    with pytest.raises(IdempotencyConflict):
        await store.submit(SPEC, owner="local", queue_cap=10, idempotency=("key", "other"))
    await store.cancel(first["id"])
    await store.delete(first["id"])
    assert (await store.submit(SPEC, owner="local", queue_cap=10, idempotency=("key", "other")))[1]


async def test_a_full_queue_refuses_jobs(store: JobStore) -> None:
    first = await submit(store, queue_cap=2)
    await submit(store, queue_cap=2)
    with pytest.raises(QueueFull):
        await submit(store, queue_cap=2)
    await claim(store, first)
    await submit(store, queue_cap=2)


async def test_only_ended_jobs_are_deleted_and_nothing_of_them_remains(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    with pytest.raises(JobActive):
        await store.delete(job_id)
    held = await claim(store, job_id)
    with pytest.raises(JobActive):
        await store.delete(job_id)
    await store.commit(held, [entry("a")])
    await store.finish(held, "completed", result=RESULT)
    await store.delete(job_id)
    for act in (store.get, store.cancel, store.delete):
        with pytest.raises(NoSuchJob):
            await act(job_id)
    with redis.Redis.from_url(url) as client:
        assert not {key for key in client.keys("reasoner:*") if job_id.encode() in key}
        left = {
            key for key in client.keys("reasoner:*") if not key.startswith(b"reasoner:shares")
        }  # of owners, not of jobs
        assert {client.type(key) for key in left} <= {b"string", b"hash"}  # counters


async def test_pages_are_newest_first_and_complete(store: JobStore) -> None:
    ids = [await submit(store) for _ in range(7)]
    for job_id in ids[::2]:
        await store.cancel(job_id)

    async def walk(status: str | None) -> list[str]:
        seen: list[str] = []
        while page := (
            await store.list_jobs(JobFilter(status), owner=None, after=seen[-1] if seen else None, limit=2)
        ).jobs:
            seen += [job["id"] for job in page]
        return seen

    assert await walk(None) == ids[::-1]
    assert await walk("cancelled") == ids[::2][::-1]
    assert await walk("queued") == ids[1::2][::-1]
    with pytest.raises(NoSuchJob):
        await store.list_jobs(owner=None, after="job_" + "0" * 32, limit=2)


async def test_a_new_job_is_sent_once_and_again_only_if_its_message_is_lost(store: JobStore, url: str) -> None:
    job_id = await submit(store)
    with redis.Redis.from_url(url) as client:
        assert await store.reap(3) == [(job_id, "interactive")]
        assert await store.reap(3) == []  # just sent
        client.lpush("interactive", "a message")
        for _ in range(3):
            age_messages(url)
            assert await store.reap(3) == []  # waiting in the queue
        client.delete("interactive")
        age_messages(url)
        assert await store.reap(3) == []  # it has just left the queue
        assert await store.reap(3) == []
        age_messages(url)
        assert await store.reap(3) == [(job_id, "interactive")]  # in no queue, and not claimed


async def test_a_message_taken_by_a_dead_worker_is_sent_again_while_others_are_queued(
    store: JobStore, url: str
) -> None:
    submitted = {await submit(store) for _ in range(3)}
    assert {job_id for job_id, _ in await store.reap(3)} == submitted
    with redis.Redis.from_url(url) as client:
        client.lpush("interactive", *["a message"] * 2)  # of three messages, one has been taken
        for _ in range(2):
            age_messages(url)
            num_sent = len(await store.reap(3))
        assert num_sent == 1
        client.lpush("interactive", "a message")
        for _ in range(3):
            age_messages(url)
            assert await store.reap(3) == []


async def test_a_queue_holds_no_more_messages_than_workers_take_between_two_sweeps(store: JobStore, url: str) -> None:
    await store.reap(3, WakeupTemplates(run="JOB-ID", webhook="JOB-ID"))
    for _ in range(2002):
        await submit(store, queue_cap=10_000)
    with redis.Redis.from_url(url) as client:
        assert client.llen("interactive") == 2000
        assert await store.reap(3) == []
        client.rpop("interactive", 500)
        for _ in range(2):  # those may be on their way to a claim
            age_messages(url)
            num_sent = len(await store.reap(3))
        assert num_sent == 500
        assert client.llen("interactive") == 2000


async def test_the_job_of_a_silent_worker_is_woken_and_that_of_a_live_one_is_not(store: JobStore, url: str) -> None:
    silent, live = await claim(store, await submit(store)), await claim(store, await submit(store))
    assert await store.reap(3) == []
    expire(url, silent.job_id)
    expire(url, live.job_id)
    await store.heartbeat([live])
    assert await store.reap(3) == [(silent.job_id, "interactive")]
    await claim(store, silent.job_id, "w2")
    counts, counters = await store.get_stats()
    assert (counts["in_progress"], counters["lease_reclaims"]) == (2, 1)


async def test_followers_get_every_event_from_any_start(store: JobStore) -> None:
    held = await claim(store, await submit(store))

    async def read(after: int) -> list[int]:
        return [event.seq async for event in store.follow(held.job_id, after)]

    early = [asyncio.create_task(read(after)) for after in range(3)]
    for index in range(20):
        await store.commit(held, [entry(f"k{index}")])
    await store.finish(held, "completed", result=RESULT)
    late = [asyncio.create_task(read(after)) for after in range(23)]
    for after, seen in enumerate(await asyncio.gather(*early)):
        assert seen == list(range(after + 1, 24))
    for after, seen in enumerate(await asyncio.gather(*late)):
        assert seen == list(range(after + 1, 24))


async def test_a_journal_of_any_length_is_read_completely(store: JobStore) -> None:
    held = await claim(store, await submit(store))
    keys = [f"k{index}" for index in range(450)]
    await store.commit(held, [entry(key) for key in keys])
    await store.finish(held, "completed", result=RESULT)
    assert [item.key for item in await store.load_entries(held.job_id)] == keys
    assert [event.seq for event in await store.load_events(held.job_id, 5)] == list(range(6, 454))
    assert [event.seq async for event in store.follow(held.job_id)] == list(range(1, 454))


async def test_waiting_ends_with_the_job_or_at_the_time_limit(store: JobStore) -> None:
    held = await claim(store, await submit(store))
    assert (await store.wait_for_end(held.job_id, 0.05))["status"] == "in_progress"
    waiting = asyncio.create_task(store.wait_for_end(held.job_id, 30))
    await store.finish(held, "completed", result=RESULT)
    assert (await waiting)["status"] == "completed"


async def test_a_cancellation_at_any_moment_is_never_swallowed(store: JobStore) -> None:
    held = await claim(store, await submit(store))

    async def beat_for_ever() -> None:
        while True:
            await store.heartbeat([held])

    for moment in range(200):
        beating = asyncio.create_task(beat_for_ever())
        for _ in range(moment):
            await asyncio.sleep(0)
        beating.cancel()
        _, pending = await asyncio.wait({beating}, timeout=5)
        assert not pending, moment


async def test_the_jobs_of_a_queue_are_ready_or_run_and_one_that_waits_for_its_engine_is_neither(
    store: JobStore,
) -> None:
    first, second, third = [await submit(store) for _ in range(3)]
    job, _ = await store.submit(SPEC | {"priority": "batch"}, owner="local", queue_cap=1000)
    late = str(job["id"])
    await claim(store, first)
    held = await claim(store, second)
    await store.release(held, reason="engine_unavailable", detail="", delay=60.0)
    assert await store.get_queues() == {
        "interactive": {"ready": 1, "running": 1},
        "batch": {"ready": 1, "running": 0},
    }
    await store.cancel(third)
    await claim(store, late)
    assert await store.get_queues() == {
        "interactive": {"ready": 0, "running": 1},
        "batch": {"ready": 0, "running": 1},
    }
