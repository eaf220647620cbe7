"""One wake-up, from claim to end: the lease kept alive, the search run, its outcome or its failure recorded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

import structlog
from pydantic import ValidationError
from structlog.contextvars import bound_contextvars

from engine.protocol.types import EngineClient, EngineError, EngineUnavailable, InvalidRequest
from reasoner.admission.validation import JobRefused
from reasoner.budget.grant_source import JobParked
from reasoner.jobs.job import JobError
from reasoner.jobs.journal import JobCancelled, Journal, LeaseLost
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome
from workers.engines.tenant_isolation import TenantEngine
from workers.store.batches import BatchStore
from workers.store.claims import Claim
from workers.store.jobs import JobStore
from workers.store.journal import RedisJournal
from workers.store.redis_client import BROKER_DOWN
from workers.telemetry import tracing

ENGINE_RETRY_SECONDS = 3.0
"""After which a job tries by itself, where no API process reaches the engines to wake it
(``workers.engines.watch``)."""
BROKER_RETRY_SECONDS = 0.5
BEATS_PER_LEASE = 6
"""A heartbeat is also how a job that is thinking hears of its cancellation, so it comes often."""

log = structlog.get_logger("reasoner.worker")


class RunJob(Protocol):
    """The signature of ``reasoner.run.run_job``."""

    def __call__(
        self, spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event
    ) -> Awaitable[JobOutcome]: ...


class ShutdownRequested(Exception):
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
        cancelled = asyncio.Event()
        # One for the whole life of the claim: grants of a batch may follow each other faster than it beats.
        heartbeat = asyncio.create_task(_keep_lease(claim, store, cancelled))
        try:
            going: Claim | None = claim
            while going is not None:
                search = _search(going, store, engine, run, draining, heartbeat, cancelled)
                going = await _record(going, store, search)
        except LeaseLost:
            log.warning("lease lost: another worker has the job")
        except BROKER_DOWN as error:
            # What the journal holds is safe; whoever claims the job next goes on from there.
            log.error("broker lost: the job is handed back once it answers", error=type(error).__name__)
            await _hand_back_late(claim, store, draining)
        finally:
            heartbeat.cancel()
            await asyncio.wait({heartbeat})


async def _record(claim: Claim, store: JobStore, search: Awaitable[JobOutcome]) -> Claim | None:
    """Awaits the search and writes how it ended; answers a claim to go on with when it only asked for more."""
    try:
        outcome = await search
    except (LeaseLost, *BROKER_DOWN):
        raise
    except JobCancelled as end:
        await store.finish(claim, "cancelled", result=end.result)
        log.info("job cancelled")
        tracing.describe({tracing.STATUS: "cancelled"})
    except JobParked as parked:
        try:
            share = await BatchStore(store).park(claim, parked.request)
        except JobCancelled:
            log.info("job cancelled")
            tracing.describe({tracing.STATUS: "cancelled"})
            return None
        if share is not None:
            return replace(claim, share=share)
        log.info("job waits for its share")
    except ShutdownRequested:
        await store.release(claim, reason="shutdown", detail="the worker was asked to stop")
        log.info("job handed back")
    except EngineUnavailable as error:
        await store.release(claim, reason="engine_unavailable", detail=str(error), delay=ENGINE_RETRY_SECONDS)
        log.warning("engine unavailable: job handed back", error=str(error))
    except Exception as error:
        failure = _failure(error)
        await store.finish(claim, "failed", error=failure)
        # Other messages may quote the problem.
        missing = isinstance(error, InvalidRequest) and error.field in ("model", "verifier.model")
        reason = {"reason": failure.message} if missing else {}
        log.error("job failed", code=failure.code, exc_info=failure.code == "internal_error", **reason)
        tracing.describe({tracing.STATUS: "failed"})
    else:
        await store.finish(claim, outcome.status, result=outcome.result)
        log.info("job ended", status=outcome.status, tokens=outcome.usage.total)
        tracing.describe({tracing.STATUS: outcome.status})
    return None


async def _hand_back_late(claim: Claim, store: JobStore, draining: asyncio.Event) -> None:
    """Releases the job when the broker is back, however long that takes: the attempt was not the job's fault."""
    while not draining.is_set():
        with contextlib.suppress(*BROKER_DOWN):
            if await store.release(claim, reason="broker_unavailable", detail="the worker could not reach the broker"):
                log.info("job handed back")
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BROKER_RETRY_SECONDS):
                await draining.wait()
    log.warning("broker still away: the job is left to its lease")


async def _search(
    claim: Claim,
    store: JobStore,
    engine: EngineClient,
    run: RunJob,
    draining: asyncio.Event,
    heartbeat: asyncio.Task[None],
    cancelled: asyncio.Event,
) -> JobOutcome:
    """Runs the search for as long as the lease holds and nobody asks this process to stop.

    ``heartbeat`` ends when the lease is lost; it goes on for as long as the caller lets it.
    """
    journal = RedisJournal(store, claim)
    spec = JobSpec.model_validate(claim.spec)
    search = asyncio.ensure_future(run(spec, TenantEngine(engine, claim.owner), journal, cancelled=cancelled))
    drained = asyncio.create_task(draining.wait())
    try:
        await asyncio.wait({search, heartbeat, drained}, return_when=asyncio.FIRST_COMPLETED)
        if not search.done():
            search.cancel()
        # Let it book what was in flight; the lease is kept meanwhile.
        await asyncio.gather(search, return_exceptions=True)
        if heartbeat.done():
            heartbeat.result()
            raise LeaseLost(claim.job_id)
        if search.cancelled():
            raise ShutdownRequested
        return search.result()
    finally:
        drained.cancel()
        await asyncio.wait({drained})


async def _keep_lease(claim: Claim, store: JobStore, cancelled: asyncio.Event) -> None:
    """Renews the lease until it is lost, and passes a cancellation on."""
    while True:
        await asyncio.sleep(claim.lease / BEATS_PER_LEASE)
        try:
            beat = await store.heartbeat(claim)
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
        case JobRefused():
            return JobError(code="invalid_spec", message=f"this version cannot run the job: {error}")
        case ValidationError():
            problems = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
            return JobError(code="invalid_spec", message=f"this version cannot run the job: {problems}")
        case _:
            return JobError(code="internal_error", message=f"{type(error).__name__}: {error}")
