"""Broker outages, sweeps that were missed, and clocks set back: live workers keep their jobs, dead ones do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from engine.protocol.types import EngineClient
from reasoner.jobs.journal import Journal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome
from tests.scripted import ScriptedEngine
from tests.workers.execution.test_execute import OUTCOME
from tests.workers.execution.test_execute import SPEC as REAL_SPEC
from tests.workers.store.helpers import claim, entry, expire, submit
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

LEASE = 3.0


def pass_time(url: str, seconds: float, *, looked: bool) -> None:
    """Make all recorded times earlier, as if so many seconds had passed. ``looked``: True if reapers swept
    meanwhile.
    """
    ms = round(seconds * 1000)
    with redis.Redis.from_url(url, decode_responses=True) as client:
        for index in ("reasoner:due", "reasoner:webhooks"):
            for job_id in client.zrange(index, 0, -1):
                client.zincrby(index, -ms, job_id)
        for job_id in client.zrange("reasoner:jobs:in_progress", 0, -1):
            client.hincrby(f"reasoner:job:{job_id}", "lease", -ms)
        client.hincrby("reasoner:sent", "interactive:at", -ms)
        if not looked:
            client.decrby("reasoner:looked", ms)


async def running(store: JobStore) -> Any:
    return await claim(store, await submit(store), lease=LEASE)


@pytest.mark.parametrize("first", ["a reaper", "a message that was left"])
@pytest.mark.parametrize("away", [1.1, 4.0, 3600.0])
async def test_after_an_outage_a_live_worker_has_a_full_lease_to_send_a_heartbeat(
    store: JobStore, url: str, first: str, away: float
) -> None:
    held = await running(store)
    pass_time(url, LEASE - 0.01, looked=True)  # its heartbeat is due
    pass_time(url, away, looked=False)
    if first == "a reaper":
        assert await store.reap(1) == []
    assert await store.claim(held.job_id, lease=LEASE, max_attempts=1, worker="w2") is None
    pass_time(url, LEASE - 0.5, looked=True)
    assert await store.reap(1) == []
    assert await store.heartbeat([held]) == ["ok"]
    pass_time(url, LEASE - 0.5, looked=True)
    assert await store.reap(1) == []
    assert await store.commit(held, [entry("a")]) == "ok"
    job = await store.get(held.job_id)
    assert (job["status"], job["attempt"]) == ("in_progress", 1)


async def test_a_worker_that_died_during_an_outage_loses_its_job_one_lease_after_it(store: JobStore, url: str) -> None:
    held = await running(store)
    pass_time(url, 60, looked=False)
    assert await store.reap(3) == []
    pass_time(url, LEASE, looked=True)
    assert await store.reap(3) == [(held.job_id, "interactive")]
    assert (await claim(store, held.job_id)).attempt == 2


async def test_a_worker_dead_before_an_outage_gets_no_extra_time(store: JobStore, url: str) -> None:
    held = await running(store)
    expire(url, held.job_id)
    pass_time(url, 60, looked=False)
    assert await store.reap(3) == [(held.job_id, "interactive")]


async def test_rare_sweeps_do_not_keep_the_job_of_a_dead_worker_forever(store: JobStore, url: str) -> None:
    held = await running(store)
    for _ in range(2):
        pass_time(url, LEASE - 0.5, looked=False)
        assert await store.reap(3) == []
    pass_time(url, LEASE - 0.5, looked=False)
    assert await store.reap(3) == [(held.job_id, "interactive")]


async def test_a_worker_with_a_heartbeat_between_two_outages_survives_both(store: JobStore, url: str) -> None:
    held = await running(store)
    for _ in range(3):
        pass_time(url, 10, looked=False)
        assert await store.reap(1) == []
        assert await store.heartbeat([held]) == ["ok"]


async def test_a_clock_set_back_delays_nothing(store: JobStore, url: str) -> None:
    held, waiting = await running(store), await submit(store)
    assert await store.reap(3) == [(waiting, "interactive")]  # its message is lost: it is in no queue
    pass_time(url, -7200, looked=False)
    assert await store.reap(3) == []
    assert await store.heartbeat([held]) == ["ok"]
    pass_time(url, 6, looked=True)
    assert sorted(await store.reap(3)) == sorted([(held.job_id, "interactive"), (waiting, "interactive")])


async def test_a_worker_releases_its_job_when_the_broker_returns_after_a_long_outage(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, asked, script = False, 0, store.script

    async def unreliable(name: str, *arguments: str | int) -> Any:
        nonlocal away, asked
        if away:
            asked += 1
            away = asked < 5
            raise redis.ConnectionError("gone")
        return await script(name, *arguments)

    async def run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
        nonlocal away
        away = True
        await journal.append([entry("a")])
        return OUTCOME

    monkeypatch.setattr(store, "script", unreliable)
    monkeypatch.setattr("workers.execution.execute.BROKER_RETRY_SECONDS", 0.01)
    job, _ = await store.submit(REAL_SPEC, owner="local", queue_cap=10)
    async with asyncio.timeout(20):
        await execute(
            job["id"],
            store=store,
            engine=ScriptedEngine(),
            run=run,
            shutting_down=asyncio.Event(),
            leases=Leases(store, LEASE),
            claims=ClaimQueue(store, lease=LEASE, max_attempts=1),
        )
    job = await store.get(job["id"])
    assert (job["status"], job["attempt"], asked) == ("queued", 0, 5)
    assert (await store.load_events(job["id"]))[-1].data["reason"] == "broker_unavailable"
    assert await store.reap(1) == [(job["id"], "interactive")]
