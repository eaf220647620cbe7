"""The children that a process keeps: shared, warm, bounded in number, replaced when they are late, gone at the end."""

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

MODULE = "tests.reasoner.asked_child"
PATIENCE = 60.0
"""Seconds allowed for questions that are to be answered."""
GUARD = 120.0


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, no_children: None) -> WorkerPool:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(subprocess_pool, "_pools", [])
    return WorkerPool(MODULE)


async def pid(pool: WorkerPool) -> int:
    found: int = await pool.ask("pid", PATIENCE)
    return found


async def asked(pool: WorkerPool) -> None:
    """Until a child that was started before computes an answer."""
    async with asyncio.timeout(GUARD):
        while not pool._busy:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_one_child_answers_one_question_after_the_other(pool: WorkerPool) -> None:
    with keep_workers_alive():
        assert await pid(pool) == await pid(pool) == (await pool.ask("print", PATIENCE))
        assert await pool.ask("raise", PATIENCE) is False
        assert await pid(pool) == pool.children[0].process.pid


async def test_a_child_is_kept_however_much_memory_its_parent_holds(pool: WorkerPool) -> None:
    """A process's peak, as the kernel counts it, begins with what its parent held: here more than half the limit."""
    held = bytearray(MEMORY_BYTES // 2 + (64 << 20))
    held[:: resource.getpagesize()] = b"1" * len(held[:: resource.getpagesize()])
    with keep_workers_alive():
        assert await pid(pool) == await pid(pool)
    assert held


async def test_a_child_that_is_started_ahead_waits_for_the_first_question(pool: WorkerPool) -> None:
    with keep_workers_alive(pool):
        (waiting,) = pool.children
        assert await pid(pool) == waiting.process.pid


def test_threads_with_event_loops_of_their_own_share_the_children(pool: WorkerPool) -> None:
    found: list[int] = []
    with keep_workers_alive(pool):
        threads = [threading.Thread(target=lambda: found.append(asyncio.run(pid(pool)))) for _ in range(3)]
        for thread in threads:
            thread.start()
            thread.join(GUARD)
    assert len(found) == 3
    assert len(set(found)) == 1


async def test_many_questions_at_once_are_answered_by_a_bounded_number_of_children(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_pool, "SIZE", 2)
    monkeypatch.setattr(subprocess_pool, "SHARE_SECONDS", 0.0)
    with keep_workers_alive():
        found = await asyncio.gather(*(pid(pool) for _ in range(8)))
        assert len(set(found)) == len(pool.children) == 2


async def test_a_child_that_is_late_or_dies_is_replaced(pool: WorkerPool) -> None:
    with keep_workers_alive(pool):
        first = pool.children[0]
        assert await pool.ask("hang", 0.01) is None
        assert first.process.returncode is not None
        (second,) = pool.children  # started at once, not with the next question
        assert await pid(pool) == second.process.pid
        assert await pool.ask("die", PATIENCE) is None
        assert await pool.ask("burst", PATIENCE) is None
        assert await pid(pool) not in {first.process.pid, second.process.pid}


async def test_a_child_that_holds_much_memory_answers_no_other_question(pool: WorkerPool) -> None:
    with keep_workers_alive():
        assert await pool.ask("grow", PATIENCE) != await pid(pool)


async def test_a_question_that_is_given_up_ends_its_child_and_the_waiting_one_gets_another(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_pool, "SIZE", 1)
    with keep_workers_alive():
        first = await pid(pool)
        endless = asyncio.create_task(pool.ask("hang", PATIENCE))
        await asked(pool)
        waiting = asyncio.create_task(pid(pool))
        gone = asyncio.create_task(pid(pool))
        await asyncio.sleep(0)
        gone.cancel()
        endless.cancel()
        async with asyncio.timeout(GUARD):
            assert await waiting != first
            await asyncio.gather(endless, gone, return_exceptions=True)
            assert await pid(pool) == await waiting


async def test_a_child_that_still_starts_survives_the_question_that_did_not_wait_for_it(pool: WorkerPool) -> None:
    with keep_workers_alive(pool):
        (starting,) = pool.children
        hasty = asyncio.create_task(pid(pool))
        await asked(pool)
        hasty.cancel()
        await asyncio.gather(hasty, return_exceptions=True)
        assert pool.children == [starting]
        assert await pid(pool) == starting.process.pid


async def test_children_are_gone_when_nobody_keeps_them(pool: WorkerPool) -> None:
    with keep_workers_alive():
        with keep_workers_alive(pool):
            await pid(pool)
        (child,) = pool.children
    assert child.process.returncode is not None
    assert pool.children == []
    await pid(pool)  # one for this question alone
    assert pool.children == []


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd is Linux's")
def test_a_child_ends_with_a_parent_that_is_killed(pool: WorkerPool) -> None:
    program = (
        "import asyncio, sys\n"
        "from reasoner.subprocess_pool import WorkerPool, keep_workers_alive\n"
        f"pool = WorkerPool({MODULE!r})\n"
        "with keep_workers_alive():\n"
        "    print(asyncio.run(pool.ask('pid', 60)), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.communicate()
        assert select.record_selection([child], [], [], GUARD)[0]
    finally:
        os.close(child)
