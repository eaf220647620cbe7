"""Worker pools: workers are shared, kept warm, bounded in number, replaced when late, and ended with the last block."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reasoner import subprocess_pool
from reasoner.subprocess_pool import WorkerPool, keep_workers_alive
from reasoner.subprocess_worker import MEMORY_BYTES

MODULE = "tests.reasoner.sample_worker"
CPU_SECONDS = 60.0
"""Time limit of requests that are expected to finish."""
GUARD_SECONDS = 120.0


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, no_workers: None) -> WorkerPool:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(subprocess_pool, "_pools", [])
    return WorkerPool(MODULE)


async def get_pid(pool: WorkerPool) -> int:
    pid: int = await pool.call("pid", CPU_SECONDS)
    return pid


async def wait_until_busy(pool: WorkerPool) -> None:
    """Wait until a worker that was started before has a request."""
    async with asyncio.timeout(GUARD_SECONDS):
        while not pool._num_busy:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_one_worker_handles_requests_one_after_the_other(pool: WorkerPool) -> None:
    with keep_workers_alive():
        assert await get_pid(pool) == await get_pid(pool) == (await pool.call("print", CPU_SECONDS))
        assert await pool.call("raise", CPU_SECONDS) is False
        assert await get_pid(pool) == pool.idle_workers[0].process.pid


async def test_a_worker_survives_however_much_memory_its_parent_uses(pool: WorkerPool) -> None:
    """The kernel counts a process's peak memory from its parent's, here more than half of the limit."""
    held = bytearray(MEMORY_BYTES // 2 + (64 << 20))
    held[:: resource.getpagesize()] = b"1" * len(held[:: resource.getpagesize()])
    with keep_workers_alive():
        assert await get_pid(pool) == await get_pid(pool)
    assert held


async def test_a_prestarted_worker_handles_the_first_request(pool: WorkerPool) -> None:
    with keep_workers_alive(pool):
        (waiting,) = pool.idle_workers
        assert await get_pid(pool) == waiting.process.pid


def test_threads_with_their_own_event_loops_share_the_workers(pool: WorkerPool) -> None:
    pids: list[int] = []
    with keep_workers_alive(pool):
        threads = [threading.Thread(target=lambda: pids.append(asyncio.run(get_pid(pool)))) for _ in range(3)]
        for thread in threads:
            thread.start()
            thread.join(GUARD_SECONDS)
    assert len(pids) == 3
    assert len(set(pids)) == 1


async def test_concurrent_requests_use_a_bounded_number_of_workers(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_pool, "MAX_WORKERS", 2)
    monkeypatch.setattr(subprocess_pool, "SHARE_SECONDS", 0.0)
    with keep_workers_alive():
        pids = await asyncio.gather(*(get_pid(pool) for _ in range(8)))
        assert len(set(pids)) == len(pool.idle_workers) == 2


async def test_a_worker_that_times_out_or_dies_is_replaced(pool: WorkerPool) -> None:
    with keep_workers_alive(pool):
        first = pool.idle_workers[0]
        assert await pool.call("hang", 0.01) is None
        assert first.process.returncode is not None
        (second,) = pool.idle_workers  # started immediately, not with the next request
        assert await get_pid(pool) == second.process.pid
        assert await pool.call("die", CPU_SECONDS) is None
        assert await pool.call("burst", CPU_SECONDS) is None
        assert await get_pid(pool) not in {first.process.pid, second.process.pid}


async def test_a_worker_over_its_memory_limit_handles_no_other_request(pool: WorkerPool) -> None:
    with keep_workers_alive():
        assert await pool.call("grow", CPU_SECONDS) != await get_pid(pool)


async def test_cancelling_a_request_ends_its_worker_and_the_waiting_request_gets_another(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_pool, "MAX_WORKERS", 1)
    with keep_workers_alive():
        first = await get_pid(pool)
        endless = asyncio.create_task(pool.call("hang", CPU_SECONDS))
        await wait_until_busy(pool)
        waiting = asyncio.create_task(get_pid(pool))
        gone = asyncio.create_task(get_pid(pool))
        await asyncio.sleep(0)
        gone.cancel()
        endless.cancel()
        async with asyncio.timeout(GUARD_SECONDS):
            assert await waiting != first
            await asyncio.gather(endless, gone, return_exceptions=True)
            assert await get_pid(pool) == await waiting


async def test_a_starting_worker_survives_the_cancellation_of_its_request(pool: WorkerPool) -> None:
    with keep_workers_alive(pool):
        (starting,) = pool.idle_workers
        hasty = asyncio.create_task(get_pid(pool))
        await wait_until_busy(pool)
        hasty.cancel()
        await asyncio.gather(hasty, return_exceptions=True)
        assert pool.idle_workers == [starting]
        assert await get_pid(pool) == starting.process.pid


async def test_workers_end_with_the_outermost_block(pool: WorkerPool) -> None:
    with keep_workers_alive():
        with keep_workers_alive(pool):
            await get_pid(pool)
        (worker,) = pool.idle_workers
    assert worker.process.returncode is not None
    assert pool.idle_workers == []
    await get_pid(pool)  # a worker for this request alone
    assert pool.idle_workers == []


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_a_worker_ends_with_its_killed_parent(pool: WorkerPool) -> None:
    program = (
        "import asyncio, sys\n"
        "from reasoner.subprocess_pool import WorkerPool, keep_workers_alive\n"
        f"pool = WorkerPool({MODULE!r})\n"
        "with keep_workers_alive():\n"
        "    print(asyncio.run(pool.call('pid', 60)), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.communicate()
        assert select.select([worker], [], [], GUARD_SECONDS)[0]
    finally:
        os.close(worker)
