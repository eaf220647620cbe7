"""Waking of jobs that wait for an engine, with as few probes as possible."""

from __future__ import annotations

from tests.workers.store.helpers import entry
from workers.engines.watch import MIN_WAKE_INTERVAL_SECONDS, EngineWatch
from workers.store.claims import Claim
from workers.store.jobs import JobStore

SPEC = {"problem": "?", "priority": "interactive", "budget": {"tokens": 10}}


class Engines:
    def __init__(self) -> None:
        self.answer = True
        self.asked = 0
        self.now = 1000.0

    async def answers(self) -> bool:
        self.asked += 1
        return self.answer


async def waiting(store: JobStore) -> str:
    """Store a job that found no engine and is due again in an hour."""
    job, _ = await store.submit(SPEC, owner="local", queue_cap=100)
    await handed_back(store, job["id"])
    return str(job["id"])


async def handed_back(store: JobStore, job_id: str) -> None:
    claim = await store.claim(job_id, lease=30, max_attempts=3, worker="one")
    assert claim is not None
    assert await store.release(claim, reason="engine_unavailable", detail="gone", delay=3600)


def watch(store: JobStore, engines: Engines) -> EngineWatch:
    return EngineWatch(store, engines.answers, lambda: engines.now)


async def test_waiting_jobs_are_woken_when_an_engine_first_answers(store: JobStore) -> None:
    engines = Engines()
    jobs = {await waiting(store) for _ in range(3)}
    assert await store.reap(3) == []
    engines.answer, watcher = False, watch(store, engines)
    assert [await watcher.check() for _ in range(3)] == [0, 0, 0]
    assert await store.reap(3) == []
    engines.answer = True
    assert await watcher.check() == 3
    assert {job_id for job_id, _ in await store.reap(3)} == jobs


async def test_engines_are_probed_only_while_a_job_waits(store: JobStore) -> None:
    engines = Engines()
    watcher = watch(store, engines)
    await store.submit(SPEC, owner="local", queue_cap=100)
    assert [await watcher.check() for _ in range(5)] == [0] * 5
    assert engines.asked == 0
    await waiting(store)
    assert await watcher.check() == 1
    assert [await watcher.check() for _ in range(5)] == [0] * 5
    assert engines.asked == 1


async def test_an_engine_that_answers_but_fails_every_job_wakes_jobs_ever_less_often(store: JobStore) -> None:
    engines = Engines()
    watcher, job_id = watch(store, engines), await waiting(store)
    assert await watcher.check() == 1
    for factor in (1, 2, 4, 8, 16, 16, 16):
        await handed_back(store, job_id)
        engines.now += factor * MIN_WAKE_INTERVAL_SECONDS - 0.1
        assert await watcher.check() == 0
        engines.now += 0.1
        assert await watcher.check() == 1
    await handed_back(store, job_id)
    engines.answer = False
    assert await watcher.check() == 0
    engines.answer = True
    assert await watcher.check() == 1  # it was away, and has come back


async def test_an_engine_that_returns_after_an_outage_wakes_jobs_at_once(store: JobStore) -> None:
    engines = Engines()
    watcher, job_id = watch(store, engines), await waiting(store)
    assert await watcher.check() == 1
    await handed_back(store, job_id)
    engines.answer = False
    assert await watcher.check() == 0
    engines.answer = True
    assert await watcher.check() == 1


async def test_with_many_watching_processes_each_job_is_woken_once(store: JobStore) -> None:
    engines = Engines()
    engines.answer = False
    watchers = [watch(store, engines) for _ in range(3)]
    job_id = await waiting(store)
    for watcher in watchers:
        await watcher.check()
    engines.answer = True
    assert [await watcher.check() for watcher in watchers] == [1, 0, 0]
    assert await store.reap(3) == [(job_id, "interactive")]
    assert await store.reap(3) == []


async def test_jobs_that_ended_or_continued_meanwhile_are_not_woken(store: JobStore) -> None:
    engines = Engines()
    cancelled, gone_on = await waiting(store), await waiting(store)
    await store.cancel(cancelled)
    claim = await store.claim(gone_on, lease=30, max_attempts=3, worker="one")
    assert claim is not None
    assert await watch(store, engines).check() == 0
    assert (await store.get(gone_on))["status"] == "in_progress"
    assert not await store.has_jobs_waiting_for_engine()


async def test_a_job_without_an_engine_is_claimed_ever_less_often_until_it_goes_on(store: JobStore) -> None:
    job, _ = await store.submit(SPEC, owner="local", queue_cap=100)

    async def hold() -> Claim:
        claim = await store.claim(str(job["id"]), lease=30, max_attempts=3, worker="one")
        assert claim is not None
        return claim

    async def waits(releases: int) -> list[int]:
        seconds = []
        for _ in range(releases):
            await store.release(await hold(), reason="engine_unavailable", detail="gone", delay=3)
            due, now = await store.command("ZSCORE", "reasoner:due", job["id"]), await store.command("TIME")
            seconds.append(round(float(due) / 1000 - int(now[0]) - int(now[1]) / 1e6))
        return seconds

    assert await waits(6) == [3, 6, 12, 24, 24, 24]
    claim = await hold()
    await store.commit(claim, [entry("a")])
    await store.release(claim, reason="shutdown", detail="")
    assert await waits(2) == [3, 6]
