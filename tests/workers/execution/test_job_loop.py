"""The event loop of a worker: all jobs on one thread, an orderly end, and a report of what blocks it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
import structlog

from workers.execution import job_loop
from workers.execution.job_loop import Handler, JobLoop, OpenHandlers

WAIT_SECONDS = 30.0


def make_opener(handler: Handler, shutdowns: list[asyncio.Event] | None = None) -> OpenHandlers:
    @asynccontextmanager
    async def open_handlers(shutting_down: asyncio.Event) -> AsyncIterator[Mapping[str, Handler]]:
        if shutdowns is not None:
            shutdowns.append(shutting_down)
        yield {"run": handler}

    return open_handlers


def test_a_thousand_wake_ups_run_at_once_on_one_thread() -> None:
    threads: set[int] = set()
    arrived: list[str] = []
    all_there = asyncio.Event()
    ended, last = Counter[str](), threading.Event()

    async def handle(job_id: str) -> None:
        threads.add(threading.get_ident())
        arrived.append(job_id)
        if len(arrived) == 1000:
            all_there.set()
        await all_there.wait()

    def done() -> None:
        ended["jobs"] += 1
        if ended["jobs"] == 1000:
            last.set()

    loop = JobLoop(make_opener(handle))
    loop.start()
    for number in range(1000):
        loop.submit("run", f"job_{number}", done)
    assert last.wait(WAIT_SECONDS)
    loop.stop()
    assert sorted(arrived) == sorted(f"job_{number}" for number in range(1000))
    assert len(threads) == 1


def test_a_shutdown_reaches_running_jobs_begins_no_others_and_waits_for_the_running() -> None:
    began, handed_back, done = threading.Event(), list[str](), Counter[str]()
    shutdowns: list[asyncio.Event] = []

    async def handle(job_id: str) -> None:
        began.set()
        await shutdowns[0].wait()
        await asyncio.sleep(0.05)  # as a job that commits what was in flight
        handed_back.append(job_id)

    loop = JobLoop(make_opener(handle, shutdowns))
    loop.start()
    loop.submit("run", "first", lambda: done.update(["first"]))
    assert began.wait(WAIT_SECONDS)
    loop.shut_down()
    loop.submit("run", "late", lambda: done.update(["late"]))
    loop.stop()
    assert handed_back == ["first"]
    assert done == {"first": 1, "late": 1}
    loop.shut_down()  # a signal may come after the end
    loop.stop()


def test_a_wake_up_that_fails_is_logged_and_the_others_go_on() -> None:
    fine = threading.Event()

    async def handle(job_id: str) -> None:
        if job_id == "bad":
            raise ValueError("a bug")
        fine.set()

    loop = JobLoop(make_opener(handle))
    loop.start()
    done = Counter[str]()
    with structlog.testing.capture_logs() as logs:
        loop.submit("run", "bad", lambda: done.update(["bad"]))
        loop.submit("run", "good", lambda: done.update(["good"]))
        assert fine.wait(WAIT_SECONDS)
        loop.stop()
    assert done == {"bad": 1, "good": 1}
    assert [(line["event"], line["job"]) for line in logs] == [("a wake-up failed", "bad")]


def test_a_start_that_fails_raises_its_reason() -> None:
    @asynccontextmanager
    async def open_handlers(_: asyncio.Event) -> AsyncIterator[Mapping[str, Handler]]:
        raise ConnectionError("no subprocess")
        yield {}

    with pytest.raises(ConnectionError, match="no subprocess"):
        JobLoop(open_handlers).start()


def test_a_blocked_loop_is_reported_once_with_the_place_that_blocks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_loop, "BLOCKED_SECONDS", 0.2)
    reported, release = threading.Event(), threading.Event()
    reports: list[dict[str, object]] = []

    def warn(event: str, **fields: object) -> None:
        reports.append({"event": event, **fields})
        reported.set()

    monkeypatch.setattr(job_loop.log, "warning", warn, raising=False)

    def compute_without_end() -> None:
        release.wait(WAIT_SECONDS)

    async def handle(_: str) -> None:
        compute_without_end()

    loop = JobLoop(make_opener(handle))
    loop.start()
    loop.submit("run", "job", lambda: None)
    assert reported.wait(WAIT_SECONDS)
    release.set()
    loop.stop()
    (report,) = reports
    assert (report["event"], report["num_jobs"]) == ("event loop blocked", 1)
    assert "compute_without_end" in str(report["place"])
