"""One wake-up, from claim to end: the lease kept alive, the search run, its outcome or its failure recorded."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

import structlog
from pydantic import ValidationError
from structlog.contextvars import bound_contextvars

from engine.types import EngineClient, EngineError, EngineUnavailable, InvalidRequest
from reasoner.allowance import Parked
from reasoner.jobs import JobError, JobSpec
from reasoner.journal import JobCancelled, Journal, LeaseLost
from reasoner.run import JobOutcome
from workers import tracing
from workers.batches import BatchStore
from workers.journal import RedisJournal
from workers.store import BROKER_DOWN, Claim, JobStore
from workers.tenants import TenantEngine

ENGINE_RETRY_SECONDS = 3.0
BEATS_PER_LEASE = 6
"""A heartbeat is also how a job that is thinking hears of its cancellation, so it comes often."""

log = structlog.get_logger("reasoner.worker")


class RunJob(Protocol):
    """The signature of ``reasoner.run.run_job``."""

    def __call__(
        self, spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event
    ) -> Awaitable[JobOutcome]: ...


class HandBack(Exception):
    """This process is asked to stop."""


async def execute(
    job_id: str,
    *,
    store: JobStore,
    engine: EngineClient,
    run: RunJob,
    draining: asyncio.Event,
    lease: float,
    max_attempts: int,
) -> None:
    """Does what a wake-up asks for, if there is anything to do. Never raises for what a job may do wrong.

    ``draining`` hands the job back as soon as it is set.
    """
    worker = f"{socket.gethostname()}:{os.getpid()}"
    claim = await store.claim(job_id, lease=lease, max_attempts=max_attempts, worker=worker)
    if claim is None:
        return
    # Whatever is logged on the way, here or in the search, says which job it was and which request submitted it.
    about: dict[str, tracing.Attribute] = {
        tracing.JOB_ID: job_id,
        tracing.ATTEMPT: claim.attempt,
        tracing.REQUEST_ID: claim.origin.request_id,
        tracing.STRATEGY: str(claim.spec["strategy"]["name"]),
    }
    with (
        bound_contextvars(job=job_id, attempt=claim.attempt, request_id=claim.origin.request_id),
        tracing.span("job", "consumer", about, claim.origin.traceparent),
    ):
        log.info("job claimed")
        try:
            going: Claim | None = claim
            while going is not None:
                going = await _record(going, store, _search(going, store, engine, run, draining, lease))
        except LeaseLost:
            log.warning("lease lost: another worker has the job")
        except BROKER_DOWN as error:
            # What the journal holds is safe; whoever claims the job after its lease goes on from there.
            log.error("broker lost: the job is left to its lease", error=type(error).__name__)


async def _record(claim: Claim, store: JobStore, search: Awaitable[JobOutcome]) -> Claim | None:
    """Awaits the search and writes how it ended; answers a claim to go on with when it only asked for more."""
    try:
        outcome = await search
    except (LeaseLost, *BROKER_DOWN):
        raise
    except JobCancelled:
        await store.finish(claim, "cancelled")
        log.info("job cancelled")
        tracing.describe({tracing.STATUS: "cancelled"})
    except Parked as parked:
        share = await BatchStore(store).park(claim, parked.ask)
        if share is not None:
            return replace(claim, share=share)
        log.info("job waits for its share")
    except HandBack:
        await store.release(claim, reason="shutdown", detail="the worker was asked to stop")
        log.info("job handed back")
    except EngineUnavailable as error:
        await store.release(claim, reason="engine_unavailable", detail=str(error), delay=ENGINE_RETRY_SECONDS)
        log.warning("engine unavailable: job handed back", error=str(error))
    except Exception as error:
        failure = _failure(error)
        await store.finish(claim, "failed", error=failure)
        log.error("job failed", code=failure.code, exc_info=failure.code == "internal_error")
        tracing.describe({tracing.STATUS: "failed"})
    else:
        await store.finish(claim, outcome.status, result=outcome.result)
        log.info("job ended", status=outcome.status, tokens=outcome.usage.total)
        tracing.describe({tracing.STATUS: outcome.status})
    return None


async def _search(
    claim: Claim, store: JobStore, engine: EngineClient, run: RunJob, draining: asyncio.Event, lease: float
) -> JobOutcome:
    """Runs the search for as long as the lease holds and nobody asks this process to stop."""
    journal, cancelled = RedisJournal(store, claim), asyncio.Event()
    spec = JobSpec.model_validate(claim.spec)
    search = asyncio.ensure_future(run(spec, TenantEngine(engine, claim.owner), journal, cancelled=cancelled))
    lost = asyncio.create_task(_keep_lease(claim, store, cancelled, lease))
    drained = asyncio.create_task(draining.wait())
    try:
        await asyncio.wait({search, lost, drained}, return_when=asyncio.FIRST_COMPLETED)
        if not search.done():
            search.cancel()
        # Let it book what was in flight; the lease is kept meanwhile.
        await asyncio.gather(search, return_exceptions=True)
        if lost.done():
            lost.result()
            raise LeaseLost(claim.job_id)
        if search.cancelled():
            raise HandBack
        return search.result()
    finally:
        for task in (lost, drained):
            task.cancel()
        await asyncio.wait({lost, drained})


async def _keep_lease(claim: Claim, store: JobStore, cancelled: asyncio.Event, lease: float) -> None:
    """Renews the lease until it is lost, and passes a cancellation on."""
    while True:
        await asyncio.sleep(lease / BEATS_PER_LEASE)
        try:
            beat = await store.heartbeat(claim, lease)
        except BROKER_DOWN:
            continue  # the search ends by itself if it cannot write; until then nothing is lost
        if beat == "lost":
            return
        if beat == "cancel":
            cancelled.set()


def _failure(error: Exception) -> JobError:
    match error:
        case InvalidRequest():
            return JobError(code="invalid_request", message=str(error))
        case EngineError():
            return JobError(code="engine_error", message=str(error))
        case ValidationError():
            problems = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
            return JobError(code="invalid_spec", message=f"this version cannot run the job: {problems}")
        case _:
            return JobError(code="internal_error", message=f"{type(error).__name__}: {error}")
