"""Export of ended jobs: complete, in order, before they expire."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.api.conftest import serving, submitted
from tests.scripted import ScriptedEngine
from tests.workers.store.helpers import RESULT, SPEC, claim, entry, submit
from tests.workers.store.test_dead_letters import give_up
from workers.broker.reaper import Reaper
from workers.broker.wakeups import make_celery, make_templates
from workers.config.settings import Settings
from workers.store import history as history_module
from workers.store.files import FileStore
from workers.store.jobs import JobStore

Work = Callable[[str], Awaitable[None]]


async def exported(client: httpx.AsyncClient, **parameters: Any) -> list[dict[str, Any]]:
    response = await client.get("/v1/jobs/export", params=parameters)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_every_ended_job_is_exported_as_the_api_shows_it_in_the_order_of_ends(
    client: httpx.AsyncClient, store: JobStore, work: Work
) -> None:
    # A worker takes the oldest job of a queue.
    first, waiting = [await submitted(client, priority="batch") for _ in range(2)]
    second, third = [await submitted(client) for _ in range(2)]
    for job_id in (second, first, third):
        await work(job_id)
    lines = await exported(client)
    assert [line["id"] for line in lines] == [second, first, third]
    assert lines == [(await client.get(f"/v1/jobs/{job_id}")).json() for job_id in (second, first, third)]
    await client.post(f"/v1/jobs/{waiting}/cancel")
    assert [line["id"] for line in await exported(client, status="cancelled")] == [waiting]


async def test_with_the_journal_an_export_has_all_events_of_a_stream(
    client: httpx.AsyncClient, store: JobStore, work: Work
) -> None:
    job_id = await submitted(client, strategy={"name": "beam", "n": 4})
    await work(job_id)
    (line,) = await exported(client, journal=True)
    assert line["events"] == [event.model_dump() for event in await store.load_events(job_id)]
    assert len(line["events"]) == line["last_seq"]
    assert "events" not in (await exported(client))[0]


async def test_an_export_continues_after_the_previous_one(client: httpx.AsyncClient, work: Work) -> None:
    jobs = [await submitted(client) for _ in range(3)]
    await work(jobs[0])
    await work(jobs[1])
    before = await exported(client)
    await work(jobs[2])
    after = await exported(client, since=before[-1]["finished_at"])
    assert [line["id"] for line in after] == jobs[1:]
    assert await exported(client, since=after[-1]["finished_at"] + 1) == []


async def test_jobs_that_ended_at_the_same_time_are_exported_once_each_over_any_number_of_pages(
    store: JobStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "_PAGE_SIZE", 3)
    jobs = [await submit(store) for _ in range(20)]
    for job_id in jobs:
        await store.cancel(job_id)
    with redis.Redis.from_url(url) as client:  # all but the first and last two in one millisecond
        client.zadd("reasoner:jobs:ended", dict.fromkeys(jobs[2:18], 5_000) | {jobs[0]: 1_000, jobs[1]: 4_999})
        client.zadd("reasoner:jobs:ended", {jobs[18]: 5_001, jobs[19]: 9_000})
    seen = []
    async for job_id in store.iterate_ended(None, 1.0, 8.0):
        seen.append(job_id)
        if len(seen) == 5:
            await store.delete(seen[3])
            await store.delete(seen[1])
    assert seen == [jobs[0], jobs[1], *sorted(jobs[2:18]), jobs[18]]


async def test_an_owner_exports_its_own_jobs_only(store: JobStore) -> None:
    ids = {}
    for owner in ("her", "him"):
        job, _ = await store.submit(SPEC, owner=owner, queue_cap=10)
        await store.cancel(job["id"])
        ids[owner] = job["id"]
    until = await store.get_broker_time()
    assert [job_id async for job_id in store.iterate_ended("her", 0, until)] == [ids["her"]]
    everyone = [job_id async for job_id in store.iterate_ended(None, 0, until)]
    assert sorted(everyone) == sorted(ids.values())  # both may have ended in one millisecond: ordered by their ids then


async def test_a_retried_job_is_not_exported(client: httpx.AsyncClient, store: JobStore, url: str) -> None:
    job_id = await submitted(client)
    await give_up(store, url, job_id)
    assert [line["id"] for line in await exported(client)] == [job_id]
    await client.post(f"/v1/jobs/{job_id}/retry")
    assert await exported(client) == []


@pytest.mark.parametrize(("query", "field"), [("since=x", "since"), ("since=-1", "since"), ("status=done", "status")])
async def test_an_invalid_query_parameter_is_refused_by_name(client: httpx.AsyncClient, query: str, field: str) -> None:
    response = await client.get(f"/v1/jobs/export?{query}")
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, field)


async def test_without_a_broker_an_export_fails_before_its_first_line(settings: Settings) -> None:
    away = settings.model_copy(update={"redis_url": "unix:///nowhere.sock"})
    async with serving(away, ScriptedEngine()) as client:
        assert (await client.get("/v1/jobs/export")).status_code == 503


async def test_expired_jobs_are_removed_completely_and_not_earlier(
    store: JobStore, settings: Settings, url: str, tmp_path: Path
) -> None:
    kept, old, running = await submit(store), await submit(store), await submit(store)
    held = await claim(store, old)
    await store.commit(held, [entry("a")])
    await store.finish(held, "completed", result=RESULT)
    await store.cancel(kept)
    await claim(store, running)
    with redis.Redis.from_url(url) as client:
        long_ago = (await store.get_broker_time() - 61) * 1000
        for index in ("reasoner:jobs:ended", "reasoner:jobs:of:local:ended"):
            assert client.zadd(index, {old: long_ago}, xx=True, ch=True) == 1
        reaper = Reaper(
            store, FileStore(store, tmp_path), make_templates(make_celery(settings)), max_attempts=3, retention=60
        )
        await reaper.sweep()
        keys = [key for key in client.scan_iter("reasoner:*") if old.encode() in key]
        assert keys == []
        lists = list(client.scan_iter("reasoner:jobs*"))
        assert lists
        for key in lists:
            assert client.zscore(key, old) is None
    for job_id in (kept, running):
        await store.get(job_id)
