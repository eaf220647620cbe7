"""The Celery tasks for jobs and webhooks, and the start and shutdown of a worker process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from celery import Celery
from celery.platforms import EX_FAILURE, EX_OK
from celery.signals import setup_logging, worker_init, worker_shutdown, worker_shutting_down

from engine.remote.health import Health
from reasoner.answers.equivalence import POOL as COMPARING
from reasoner.run import run_job
from reasoner.subprocess_pool import keep_workers_alive
from workers.broker.embedded import broker_url
from workers.broker.wakeups import RUN_TASK, WEBHOOK_TASK, make_celery
from workers.config.reload import LiveSettings
from workers.config.settings import Settings
from workers.engines.connect import connect
from workers.execution.execute import RunJob, execute
from workers.execution.liveness import touch_while_consuming
from workers.processes.shutdown import treat_as_first_signal
from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore
from workers.telemetry.logs import configure_logging
from workers.telemetry.tracing import traced
from workers.webhooks.deliver import deliver

BROKER_RETRY_SECONDS = 10.0
"""The time for which a running job retries while the broker is away."""


class ShutdownSignal:
    """Shutdown signal for all running jobs, each on the event loop of its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._is_set = False

    def set(self, **_: Any) -> None:
        """Safe in a signal handler of the main thread, which holds the lock nowhere else."""
        with self._lock:
            self._is_set = True
            for loop, event in self._listeners:
                loop.call_soon_threadsafe(event.set)

    @contextlib.contextmanager
    def listen(self) -> Iterator[asyncio.Event]:
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.add(listener)
            if self._is_set:
                listener[1].set()
        try:
            yield listener[1]
        finally:
            with self._lock:
                self._listeners.discard(listener)


def make_worker(settings: Settings, run: RunJob | None = None) -> Celery:
    """Return the Celery application with its tasks. Each job runs on its own event loop in a thread of the pool.

    ``run``: replaces the search in tests. Raises ``ConfigError`` for an invalid calibration.
    """
    calibration = settings.read_calibration()
    live = LiveSettings(settings)
    app = make_celery(settings)
    if settings.alive_file is not None:
        touch_while_consuming(app, settings.alive_file)
    health, shutdown_signal = Health(), ShutdownSignal()
    worker_shutting_down.connect(shutdown_signal.set, weak=False)
    setup_logging.connect(configure_logging, weak=False)
    children = contextlib.ExitStack()
    worker_init.connect(lambda **_: children.enter_context(keep_workers_alive(COMPARING)), weak=False)
    worker_shutdown.connect(lambda **_: children.close(), weak=False)

    async def run_one(job_id: str) -> None:
        store = JobStore(broker_url(settings), retry_seconds=BROKER_RETRY_SECONDS)
        engine = traced(connect(settings, health=health, redis=store))
        search: RunJob = run or functools.partial(
            run_job, prices=live.now.prices, calibration=calibration, allow_unsandboxed_python=settings.unlocked_tests
        )
        try:
            with shutdown_signal.listen() as shutting_down:
                if shutting_down.is_set():
                    return  # the reaper sends the wake-up again
                await execute(
                    job_id,
                    store=store,
                    engine=engine,
                    run=search,
                    shutting_down=shutting_down,
                    lease=settings.lease_seconds,
                    max_attempts=settings.max_attempts,
                    engine_wait=live.now.engine_wait_seconds,
                )
        finally:
            await engine.close()
            with contextlib.suppress(*BROKER_DOWN):  # losing these counts does no harm
                await store.increment_counters(
                    {f"engine:{what}:{name}": count for (name, what), count in health.take_counts().items()}
                )
            await store.close()

    def run_task(job_id: str) -> None:
        asyncio.run(run_one(job_id))

    async def deliver_one(job_id: str) -> None:
        store = JobStore(broker_url(settings), retry_seconds=BROKER_RETRY_SECONDS)
        try:
            await deliver(job_id, store=store, settings=live.now)
        finally:
            await store.close()

    def webhook_task(job_id: str) -> None:
        asyncio.run(deliver_one(job_id))

    app.task(run_task, name=RUN_TASK)
    app.task(webhook_task, name=WEBHOOK_TASK)
    return app


def serve(app: Celery, queues: Sequence[str]) -> None:
    """Work for these queues, in order of precedence, until SIGTERM or Ctrl-C. Raises ``KeyboardInterrupt``.

    Raises ``SystemExit`` with a status other than 0 if the worker ended for another reason.
    """
    stopped_by: list[str] = []
    workers: list[Any] = []

    def shutting_down(sig: str, **_: Any) -> None:
        stopped_by.append(sig)
        treat_as_first_signal(signal.Signals[sig])  # with Celery's handler a second Ctrl-C would wait for timeouts

    def starting(sender: Any, **_: Any) -> None:
        workers.append(sender)

    worker_shutting_down.connect(shutting_down, weak=False)
    worker_init.connect(starting, weak=False)
    app.worker_main(
        [
            "--quiet",
            "worker",
            "--pool=threads",
            f"--queues={','.join(queues)}",
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
            "--loglevel=WARNING",
        ]
    )
    if "SIGINT" in stopped_by:
        raise KeyboardInterrupt
    exit_code = workers[0].exitcode if workers else None
    if not stopped_by and exit_code != EX_OK:  # Celery has logged the reason, and returns as after an orderly end
        sys.exit(exit_code or EX_FAILURE)
