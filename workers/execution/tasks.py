"""The two Celery tasks, and how a worker process starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from celery import Celery
from celery.signals import setup_logging, worker_init, worker_shutdown, worker_shutting_down

from engine.client.health import Health
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
from workers.store.jobs import JobStore
from workers.store.redis_client import BROKER_DOWN
from workers.telemetry.logs import configure_logging
from workers.telemetry.tracing import traced
from workers.webhooks.deliver import deliver

BROKER_RETRY_SECONDS = 10.0
"""Seconds that a running job outlasts a broker that is away."""


class ShutdownSignal:
    """Says to every running job, each on the event loop of its thread, that this process is asked to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._begun = False

    def begin(self, **_: Any) -> None:
        """Called by a signal handler in the main thread, which never holds the lock otherwise."""
        with self._lock:
            self._begun = True
            for loop, event in self._listeners:
                loop.call_soon_threadsafe(event.set)

    @contextlib.contextmanager
    def listen(self) -> Iterator[asyncio.Event]:
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.add(listener)
            if self._begun:
                listener[1].set()
        try:
            yield listener[1]
        finally:
            with self._lock:
                self._listeners.discard(listener)


def make_worker(settings: Settings, run: RunJob | None = None) -> Celery:
    """The application with its tasks. Each job runs on an event loop of its own, in one thread of the pool.

    ``run`` is for tests; without it jobs are searched for answers, at the configured prices and with the
    configured calibration. Raises ``ConfigError`` when that cannot be used.
    """
    calibration = settings.read_calibration()
    live = LiveSettings(settings)
    app = make_celery(settings)
    if settings.alive_file is not None:
        touch_while_consuming(app, settings.alive_file)
    health = Health()
    draining = ShutdownSignal()
    worker_shutting_down.connect(draining.begin, weak=False)
    setup_logging.connect(configure_logging, weak=False)
    children = contextlib.ExitStack()
    worker_init.connect(lambda **_: children.enter_context(keep_workers_alive(COMPARING)), weak=False)
    worker_shutdown.connect(lambda **_: children.close(), weak=False)

    async def wake(job_id: str) -> None:
        store = JobStore(broker_url(settings), retry_seconds=BROKER_RETRY_SECONDS)
        engine = traced(connect(settings, health=health))
        search: RunJob = run or functools.partial(
            run_job, prices=live.now.prices, calibration=calibration, unlocked_tests=settings.unlocked_tests
        )
        try:
            with draining.listen() as stopping:
                if stopping.is_set():
                    return  # the reaper sends this wake-up again, to somebody else
                await execute(
                    job_id,
                    store=store,
                    engine=engine,
                    run=search,
                    draining=stopping,
                    lease=settings.lease_seconds,
                    max_attempts=settings.max_attempts,
                )
        finally:
            await engine.close()
            with contextlib.suppress(*BROKER_DOWN):  # these counts are then lost; nothing depends on them
                await store.increment_counters(
                    {f"engine:{what}:{name}": count for (name, what), count in health.take_counts().items()}
                )
            await store.close()

    def task(job_id: str) -> None:
        asyncio.run(wake(job_id))

    async def tell(job_id: str) -> None:
        store = JobStore(broker_url(settings), retry_seconds=BROKER_RETRY_SECONDS)
        try:
            await deliver(job_id, store=store, settings=live.now)
        finally:
            await store.close()

    def webhook_task(job_id: str) -> None:
        asyncio.run(tell(job_id))

    app.task(task, name=RUN_TASK)
    app.task(webhook_task, name=WEBHOOK_TASK)
    return app


def serve(app: Celery, queues: Sequence[str]) -> None:
    """Work for these queues, the first ones first, until SIGTERM or Ctrl-C. Raises ``KeyboardInterrupt``."""
    stopped_by: list[str] = []

    def shutting_down(sig: str, **_: Any) -> None:
        stopped_by.append(sig)
        treat_as_first_signal(signal.Signals[sig])  # Celery would let a second one wait for its time-outs

    worker_shutting_down.connect(shutting_down, weak=False)
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
