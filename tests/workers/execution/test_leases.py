"""Leases of many jobs are renewed together, whatever their event loop does, and each job learns of its own end."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack

import pytest
import redis

from tests.workers.store.helpers import claim, submit
from workers.execution import leases as module
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

LEASE = 0.6


async def test_a_hundred_leases_and_more_are_renewed_and_each_job_learns_its_state(store: JobStore, url: str) -> None:
    claims = [await claim(store, await submit(store), lease=LEASE) for _ in range(120)]
    leases = Leases(store, LEASE)
    async with asyncio.timeout(30):
        with ExitStack() as kept:
            held = [kept.enter_context(leases.keep(each)) for each in claims]
            await store.cancel(claims[7].job_id)
            with redis.Redis.from_url(url) as client:
                client.hincrby(f"reasoner:job:{claims[9].job_id}", "token", 1)  # another worker has it
            await held[7].cancelled.wait()
            await held[9].lost.wait()
            await asyncio.sleep(2 * LEASE)
            for running in claims[10:]:
                assert await store.claim(running.job_id, lease=LEASE, max_attempts=3, worker="other") is None
    assert [index for index, each in enumerate(held) if each.cancelled.is_set()] == [7]
    assert [index for index, each in enumerate(held) if each.lost.is_set()] == [9]


async def test_a_blocked_event_loop_keeps_its_leases(store: JobStore) -> None:
    running = await claim(store, await submit(store), lease=LEASE)
    with Leases(store, LEASE).keep(running) as held:
        threading.Event().wait(3 * LEASE)  # as code that computes
        assert await store.claim(running.job_id, lease=LEASE, max_attempts=3, worker="other") is None
        assert not held.lost.is_set()


async def test_a_hung_event_loop_loses_its_leases(store: JobStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUNG_SECONDS", 2 * LEASE)
    running = await claim(store, await submit(store), lease=LEASE)
    with Leases(store, LEASE).keep(running):
        threading.Event().wait(5 * LEASE)
        with redis.Redis.from_url(url, decode_responses=True) as client:
            seconds, _ = client.time()
            assert float(client.hget(f"reasoner:job:{running.job_id}", "lease") or 0) < 1000 * seconds


async def test_the_thread_ends_with_the_last_job_and_comes_with_the_next(store: JobStore) -> None:
    leases = Leases(store, LEASE)
    for _ in range(2):
        running = await claim(store, await submit(store), lease=LEASE)
        with leases.keep(running) as held:
            (thread,) = [each for each in threading.enumerate() if each.name == "leases"]
            await asyncio.sleep(2 * LEASE)
            assert not held.lost.is_set()
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()
