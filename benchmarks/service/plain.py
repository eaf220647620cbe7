"""Baseline without this service: a route that sends the whole job to Celery, and a task that runs it.

The search, the engine and the broker are the same, but nothing survives a crash: there is no journal, lease, event or
bill. ``python -m benchmarks.service.plain api|worker``, configured by the environment as our own roles are.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from typing import Any

import redis
import uvicorn
from celery import Celery
from fastapi import FastAPI

from engine.remote.http import HttpEngine
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from workers.broker.wakeups import make_celery
from workers.config.settings import Settings, load_settings

TASK, QUEUE = "plain.run", "plain"
CREATED, FINISHED, RESULTS = "plain:created", "plain:finished", "plain:results"
"""Hashes by job: times in seconds since the epoch, and results."""


def make_worker(settings: Settings) -> Celery:
    """Create the Celery application with its task, which runs the search and stores the result in Redis."""
    app = make_celery(settings)
    store = redis.Redis.from_url(str(settings.redis_url))

    async def search(spec: dict[str, Any]) -> str:
        engine = HttpEngine(settings.engine_addresses[0])
        try:
            outcome = await run_job(JobSpec.model_validate(spec), engine, MemoryJournal())
        finally:
            await engine.close()
        return outcome.result.model_dump_json()

    def task(job_id: str, spec: dict[str, Any]) -> None:
        store.hset(RESULTS, job_id, asyncio.run(search(spec)))
        store.hset(FINISHED, job_id, time.time())

    app.task(task, name=TASK)
    return app


def make_api(settings: Settings) -> FastAPI:
    """Create the API with one route, ``POST /v1/jobs``, and a readiness check."""
    app = FastAPI()
    celery = make_celery(settings)
    store = redis.Redis.from_url(str(settings.redis_url))

    @app.post("/v1/jobs", status_code=202)
    def submit(request: JobRequest) -> dict[str, str]:
        job_id = uuid.uuid4().hex
        store.hset(CREATED, job_id, time.time())
        celery.send_task(
            TASK,
            args=[job_id, resolve_program_job(request, settings.models).model_dump()],
            queue=QUEUE,
            ignore_result=True,
        )
        return {"id": job_id}

    @app.get("/readyz")
    def ready() -> dict[str, str]:
        return {"status": "ready"}

    return app


def main() -> None:
    """Run one of the two roles until SIGTERM."""
    settings = load_settings()
    if sys.argv[1] == "api":
        uvicorn.run(make_api(settings), host=settings.host, port=settings.port, log_level="warning", access_log=False)
    else:
        options = ["--pool=threads", f"--queues={QUEUE}", "--without-gossip", "--without-mingle", "--loglevel=WARNING"]
        make_worker(settings).worker_main(["--quiet", "worker", *options])


if __name__ == "__main__":
    main()
