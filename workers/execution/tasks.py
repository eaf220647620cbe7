"""The Celery tasks for jobs and webhooks, and the start and shutdown of a worker process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from celery import Celery
from celery.platforms import EX_FAILURE, EX_OK
from celery.signals import setup_logging, worker_init, worker_shutting_down

from engine.remote.health import Health
from engine.remote.http_clients import HttpClients
from reasoner.answers.equivalence import POOL as COMPARING
from reasoner.run import run_job
from reasoner.subprocess_pool import keep_workers_alive
from workers.broker.embedded import broker_url
from workers.broker.wakeups import RUN_TASK, WEBHOOK_TASK, make_celery
from workers.config.reload import LiveSettings
from workers.config.settings import Settings
from workers.engines.connect import connect
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import RunJob, execute
from workers.execution.job_loop import Handler, JobLoop
from workers.execution.leases import Leases
from workers.execution.liveness import touch_while_consuming
from workers.execution.pool import make_pool
from workers.processes.shutdown import treat_as_first_signal
from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore
from workers.telemetry.logs import configure_logging
from workers.telemetry.tracing import traced
from workers.webhooks.deliver import deliver

BROKER_RETRY_SECONDS = 10.0
"""The time for which a running job retries while the broker is away."""
REPORT_SECONDS = 1.0
"""The time between two additions to the counters of requests to engines."""


def make_worker(settings: Settings, run: RunJob | None = None) -> Celery:
    """Return the Celery application. Its worker runs all jobs on one event loop.

    ``run``: replaces the search in tests. Raises ``ConfigError`` for an invalid calibration.
    """
    calibration = settings.read_calibration()
    live = LiveSettings(settings)
    app = make_celery(settings)
    if settings.alive_file is not None:
        touch_while_consuming(app, settings.alive_file)
    setup_logging.connect(configure_logging, weak=False)

    @asynccontextmanager
    async def open_handlers(shutting_down: asyncio.Event) -> AsyncIterator[Mapping[str, Handler]]:
        store = JobStore(broker_url(settings), retry_seconds=BROKER_RETRY_SECONDS)
        leases, health, clients = Leases(store, settings.lease_seconds), Health(), HttpClients()
        claims = ClaimQueue(store, lease=settings.lease_seconds, max_attempts=settings.max_attempts)

        async def run_one(job_id: str) -> None:
            engine = traced(connect(settings, health=health, redis=store, clients=clients))
            search: RunJob = run or functools.partial(
                run_job,
                prices=live.now.prices,
                calibration=calibration,
                allow_unsandboxed_python=settings.unlocked_tests,
            )
            try:
                await execute(
                    job_id,
                    store=store,
                    engine=engine,
                    run=search,
                    shutting_down=shutting_down,
                    leases=leases,
                    claims=claims,
                    engine_wait=live.now.engine_wait_seconds,
                )
            finally:
                await engine.close()

        async def deliver_one(job_id: str) -> None:
            await deliver(job_id, store=store, settings=live.now)

        reporting = asyncio.create_task(_report_requests(health, store))
        with keep_workers_alive(COMPARING):
            try:
                yield {RUN_TASK: run_one, WEBHOOK_TASK: deliver_one}
            finally:
                reporting.cancel()
                await asyncio.wait({reporting})
                await _count_requests(health, store)
                await clients.close()
                await store.close()

    loop = JobLoop(open_handlers)
    worker_shutting_down.connect(lambda **_: loop.shut_down(), weak=False)
    app.conf.worker_pool = make_pool(loop)
    for name in (RUN_TASK, WEBHOOK_TASK):
        app.task(_refuse_to_run, name=name)
    return app


async def _report_requests(health: Health, store: JobStore) -> None:
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        await _count_requests(health, store)


async def _count_requests(health: Health, store: JobStore) -> None:
    """Add the requests to engines since the last call to the counters of the service."""
    counts = {f"engine:{what}:{name}": count for (name, what), count in health.take_counts().items()}
    with contextlib.suppress(*BROKER_DOWN):  # losing these counts does no harm
        await store.increment_counters(counts)


def _refuse_to_run(job_id: str) -> None:
    """Stand for the tasks, which the worker's own pool runs on its event loop."""
    raise RuntimeError(f"job {job_id}: another pool of Celery cannot run jobs; leave --pool out")


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
