"""The API on a loopback port, with a worker that runs every job at once on an engine without a model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from api.app.app import create_app
from engine.protocol.types import EngineClient, EngineError
from reasoner.jobs.journal import Journal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from tests.scripted import ScriptedEngine
from workers.broker import reaper
from workers.config.settings import Settings
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore
from workers.store.reaping import Reaping

JOB_SECONDS = 1.0
"""The time limit of a job, since a generated one may be large and its result does not matter."""


async def _run(spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event) -> JobOutcome:
    try:
        async with asyncio.timeout(JOB_SECONDS):
            return await run_job(spec, engine, journal, cancelled=cancelled)
    except TimeoutError:
        raise EngineError("the job is too large for this test") from None


@contextlib.contextmanager
def served(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the API in a thread and yield its URL; jobs run on its event loop."""
    ready = threading.Event()
    app = create_app(settings, ScriptedEngine())
    server = _Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1), ready)

    async def serve() -> None:
        store = JobStore(str(settings.redis_url))

        reap, leases, working = Reaping.reap, Leases(store, 60), set[asyncio.Task[None]]()
        claims = ClaimQueue(store, lease=60, max_attempts=3)

        async def reap_and_work(reaping: Reaping, max_attempts: int, *_: object) -> list[tuple[str, str]]:
            due = await reap(reaping, max_attempts)
            for job_id, _ in due:
                work = execute(
                    job_id,
                    store=store,
                    engine=ScriptedEngine(),
                    run=_run,
                    shutting_down=asyncio.Event(),
                    leases=leases,
                    claims=claims,
                )
                task = asyncio.create_task(work)
                working.add(task)
                task.add_done_callback(working.discard)
            return due

        monkeypatch.setattr(Reaping, "reap", reap_and_work)
        monkeypatch.setattr(reaper, "SWEEP_INTERVAL_SECONDS", 0.02)
        try:
            await server.serve()
        finally:
            await store.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        port: Any = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()
