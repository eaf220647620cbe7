"""Leases of many jobs are renewed together, and each job learns of its own end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis

from tests.workers.store.helpers import claim, submit
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

LEASE = 0.6


async def test_one_script_renews_a_hundred_leases_and_tells_each_job_its_state(
    store: JobStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    script = store.script

    async def count(name: str, *arguments: str | int) -> Any:
        if name == "heartbeat":
            sizes.append(len(arguments) // 3)
        return await script(name, *arguments)

    claims = [await claim(store, await submit(store), lease=LEASE) for _ in range(120)]
    monkeypatch.setattr(store, "script", count)
    leases = Leases(store, LEASE)
    async with asyncio.timeout(30):
        contexts = [leases.keep(each) for each in claims]
        held = [await context.__aenter__() for context in contexts]
        await store.cancel(claims[7].job_id)
        with redis.Redis.from_url(url) as client:
            client.hincrby(f"reasoner:job:{claims[9].job_id}", "token", 1)  # another worker has it
        await held[7].cancelled.wait()
        await held[9].lost.wait()
        for context in contexts:
            await context.__aexit__(None, None, None)
    assert max(sizes) == 100
    assert [index for index, each in enumerate(held) if each.cancelled.is_set()] == [7]
    assert [index for index, each in enumerate(held) if each.lost.is_set()] == [9]


async def test_nothing_is_renewed_without_jobs_and_again_with_the_next(store: JobStore) -> None:
    leases = Leases(store, LEASE)
    for _ in range(2):
        running = await claim(store, await submit(store), lease=LEASE)
        before = asyncio.all_tasks()
        async with leases.keep(running) as held:
            await asyncio.sleep(2 * LEASE)
            assert not held.lost.is_set()
            assert await store.claim(running.job_id, lease=LEASE, max_attempts=3, worker="other") is None
        assert asyncio.all_tasks() == before
