"""The order of the jobs of several owners: shares by weight, no owner waits for another's backlog."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections import Counter
from typing import Any

import fakeredis
import pytest

from tests.seeds import shift
from tests.workers.store.helpers import SPEC, claim, submit
from workers.broker.wakeups import make_celery, make_templates
from workers.config.rate_limits import Quota, Share
from workers.config.settings import load_settings
from workers.store.claims import Claim
from workers.store.jobs import JobStore
from workers.store.redis_client import read_scripts


async def start_next(store: JobStore, job_id: str) -> Claim | None:
    """Claim as a worker does that has got the message of this job."""
    return await store.claim(job_id, lease=60, max_attempts=3, worker="w", by_turn=True)


async def start_jobs(store: JobStore, job_id: str, count: int) -> list[str]:
    """Return the owners of the jobs that start next."""
    claims = [await start_next(store, job_id) for _ in range(count)]
    return [held.owner for held in claims if held is not None]


@pytest.mark.parametrize("seed", range(3))
def test_started_jobs_are_shared_by_weight_at_any_time(seed: int) -> None:
    """Check the bound of start-time fair queueing (its theorem 1) over every interval in which two owners wait."""
    rng = random.Random(shift(seed))
    weights = {f"owner{index}": rng.choice([0.1, 0.5, 1, 2, 3, 10]) for index in range(rng.randint(2, 5))}
    server = fakeredis.FakeRedis(decode_responses=True)
    scripts = {name: server.register_script(text) for name, text in read_scripts().items()}
    settings = "{" + ",".join(f'"{owner}":{{"weight":{weight}}}' for owner, weight in weights.items()) + "}"
    scripts["reap"](args=[0, 1000, 3, "", "", settings])
    for owner in weights:
        for index in range(150):
            spec = '{"budget":{"tokens":60}}'
            scripts["submit"](args=[f"{owner}-{index}", spec, "batch", owner, "", 10_000, "", "", "", ""])
    started = []
    for turn in range(150):
        [[_, job_id, *_]] = scripts["claim"](args=[60_000, 3, "w", 1, "owner0-0"])
        started.append(job_id.partition("-")[0])
        assert job_id == f"{started[-1]}-{started.count(started[-1]) - 1}", "in order of submission"
        if turn % 3:  # ends of jobs, and other scripts, change nothing
            scripts["finish"](args=[job_id, 1, "completed", "null", "null"])
    for first, last in itertools.combinations(range(0, 151, 10), 2):
        counts = Counter(started[first:last])
        for one, other in itertools.combinations(weights, 2):
            distance = abs(counts[one] / weights[one] - counts[other] / weights[other])
            assert distance <= (1 / weights[one] + 1 / weights[other]) * (1 + 1e-9)


async def test_the_first_job_of_an_owner_starts_before_the_backlog_of_another(store: JobStore) -> None:
    backlog = [await submit(store, owner="ann") for _ in range(30)]
    assert await start_jobs(store, backlog[0], 5) == ["ann"] * 5
    await submit(store, owner="bob")
    assert await start_jobs(store, backlog[0], 3) == ["bob", "ann", "ann"]


async def test_an_owner_gains_nothing_from_pauses_or_from_single_jobs(store: JobStore) -> None:
    backlog = [await submit(store, owner="ann") for _ in range(30)]
    await start_jobs(store, backlog[0], 10)
    for _ in range(4):  # bob comes back as soon as his last job has started
        await submit(store, owner="bob")
        assert sorted(await start_jobs(store, backlog[0], 2)) == ["ann", "bob"]
    await submit(store, owner="bob")
    await submit(store, owner="bob")
    assert Counter(await start_jobs(store, backlog[0], 4)) == {"ann": 2, "bob": 2}


async def test_weights_follow_the_settings_and_hold_per_queue(store: JobStore) -> None:
    spec = SPEC | {"priority": "batch"}
    ids: dict[str, str] = {}
    for _ in range(12):
        for owner in ("ann", "bob"):
            ids["interactive"] = await submit(store, owner=owner)
            job, _ = await store.submit(spec, owner=owner, queue_cap=1000)
            ids["batch"] = job["id"]
    await store.reap(3, shares={"": Share(), "ann": Share(3.0)})
    for queue in ("interactive", "batch"):
        assert Counter(await start_jobs(store, ids[queue], 8)) == {"ann": 6, "bob": 2}
    await store.reap(3, shares={"": Share()})
    assert Counter(await start_jobs(store, ids["batch"], 8)) == {"ann": 4, "bob": 4}


async def test_a_message_of_a_job_that_has_started_or_ended_starts_another(store: JobStore) -> None:
    first, second, third, last = [await submit(store) for _ in range(4)]
    await claim(store, first)
    await store.cancel(second)
    for message, started in ((first, third), (second, last)):
        held = await start_next(store, message)
        assert held is not None
        assert held.job_id == started
    assert await start_next(store, first) is None


async def test_a_new_job_has_a_message_before_the_next_sweep(store: JobStore, url: str) -> None:
    await store.reap(3, make_templates(make_celery(load_settings(redis_url=url))))
    job_id = await submit(store)
    assert await store.command("LLEN", "interactive") == 1
    held = await claim(store, job_id)
    await store.release(held, reason="shutdown", detail="")
    assert await store.command("LLEN", "interactive") == 2
    assert await store.reap(3) == []


async def test_an_owner_at_the_limit_of_running_jobs_waits_and_others_do_not(store: JobStore) -> None:
    templates = make_templates(make_celery(load_settings(redis_url=store.url)))
    await store.reap(3, templates, {"": Share(), "ann": Share(running=2)})
    ids = [await submit(store, owner="ann") for _ in range(4)]
    started = [await start_next(store, ids[0]) for _ in range(2)]
    assert await start_next(store, ids[0]) is None
    await submit(store, owner="ann")
    bob = await submit(store, owner="bob")
    assert await start_jobs(store, bob, 2) == ["bob"]
    await store.command("DEL", "interactive")
    assert await store.reap(3) == [], "there is nothing that a worker could start"
    assert started[0] is not None
    await store.finish(started[0], "cancelled")
    assert await store.command("LLEN", "interactive") == 1, "a worker is woken at once"
    assert await start_jobs(store, bob, 2) == ["ann"]
    await store.reap(3, templates, {"": Share(), "ann": Share(running=3)})
    assert await store.command("LLEN", "interactive") == 2
    assert await start_jobs(store, bob, 2) == ["ann"]
    assert (await store.get_stats())[0]["queued"] == 1


async def test_the_limit_of_running_jobs_holds_over_both_queues(store: JobStore) -> None:
    await store.reap(3, shares={"": Share(running=1)})
    urgent = await submit(store, owner="ann")
    job, _ = await store.submit(SPEC | {"priority": "batch"}, owner="ann", queue_cap=1000)
    held = await start_next(store, job["id"])
    assert held is not None
    assert await start_next(store, urgent) is None
    await store.release(held, reason="shutdown", detail="")
    assert await start_jobs(store, urgent, 1) == ["ann"]
    assert await start_next(store, job["id"]) is None


@pytest.mark.parametrize("seed", range(3))
async def test_the_wait_for_a_place_is_estimated_from_the_rate_and_the_turns_before_it(seed: int) -> None:
    """Simulate a service in which a job starts every so many milliseconds, until an owner's refused job has a place."""
    rng = random.Random(shift(seed))
    with pytest.MonkeyPatch.context() as patch:
        now = 1_700_000_000.0
        patch.setattr(time, "time", lambda: now)
        server = fakeredis.FakeRedis(decode_responses=True)
        scripts = {name: server.register_script(text) for name, text in read_scripts().items()}
        owners = {f"owner{index}": Share(rng.choice([0.5, 1.0, 2.0, 4.0])) for index in range(4)}
        settings = json.dumps({owner: {"weight": share.weight} for owner, share in owners.items()})
        scripts["reap"](args=[0, 1000, 3, "", "", settings])

        def submit_job(owner: str, index: int, cap: int = 10_000, quota: str = "") -> list[Any]:
            spec = '{"budget":{"tokens":60}}'
            answer: list[Any] = scripts["submit"](
                args=[f"{owner}-{index}", spec, "batch", owner, "", cap, "", "", "", quota]
            )
            return answer

        for owner in owners:
            for index in range(rng.randint(100, 200)):
                submit_job(owner, index)
        interval = rng.choice([0.05, 0.3, 2.0])

        def start_job() -> str:
            nonlocal now
            now += interval
            [[_, job_id, *_]] = scripts["claim"](args=[60_000, 3, "w", 1, "owner0-0"])
            scripts["finish"](args=[job_id, 1, "cancelled", "null", "null"])
            return str(job_id).partition("-")[0]

        assert submit_job("owner1", 999, cap=1) == ["full", 0], "nothing has started"
        for _ in range(60):
            start_job()
        unfinished = server.zcard("reasoner:jobs:of:owner1:queued")
        behind = rng.randint(0, 20)
        refused, used, seconds = submit_job("owner1", 999, quota=Quota(jobs=unfinished - behind).to_json())
        assert (refused, used) == ("jobs", unfinished)
        full = submit_job("owner1", 999, cap=server.zcard("reasoner:jobs:queued"))[1]
        assert full == pytest.approx(max(1, math.ceil(interval)), abs=1)
        asked, ends = now, 0
        while ends <= behind:
            ends += start_job() == "owner1"
        # A tenth for starts that fade, a tie with each other owner, and the second to which it is rounded.
        assert abs(seconds - (now - asked)) <= 0.1 * (now - asked) + len(owners) * interval + 1
