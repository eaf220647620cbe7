"""One wake-up of a job: claim it, run its search while keeping the lease, and record the outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

import structlog
from pydantic import ValidationError
from structlog.contextvars import bound_contextvars

from engine.protocol.request_checks import ContentFiltered, PromptTooLong
from engine.protocol.types import (
    EngineBusy,
    EngineClient,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
)
from reasoner.admission.refusal import JobRefused
from reasoner.best_so_far import choose_best_so_far
from reasoner.budget.grant_source import WaitingForBudget
from reasoner.jobs.job import JobError, JobResult, Status
from reasoner.jobs.journal import JobCancelled, Journal, LeaseLost
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.view import fold_events
from reasoner.run import JobOutcome
from workers.engines.tenant_isolation import TenantEngine
from workers.execution.claim_queue import ClaimQueue
from workers.execution.leases import HeldLease, Leases
from workers.store.batches import BatchStore
from workers.store.broker_errors import BROKER_DOWN, describe_outage
from workers.store.claims import Claim
from workers.store.jobs import JobStore
from workers.store.journal import RedisJournal
from workers.telemetry import tracing
from workers.telemetry.search_spans import find_job_span

ENGINE_RETRY_SECONDS = 3.0
"""The delay of a retry, unless an API process wakes the job before (``workers.engines.watch``)."""
BROKER_RETRY_SECONDS = 0.5

log = structlog.get_logger("reasoner.worker")


class RunJob(Protocol):
    """The signature of ``reasoner.run.run_job``."""

    def __call__(
        self, spec: JobSpec, engine: EngineClient, journal: Journal, *, cancelled: asyncio.Event
    ) -> Awaitable[JobOutcome]: ...


class ShutdownRequested(Exception):
    """The worker is shutting down, so the job goes back to the queue."""


async def execute(
    job_id: str,
    *,
    store: JobStore,
    engine: EngineClient,
    run: RunJob,
    shutting_down: asyncio.Event,
    leases: Leases,
    claims: ClaimQueue,
    engine_wait: float | None = None,
) -> None:
    """Run the job whose turn it is, woken by the message of a job of the same queue. No failure of the job raises.

    ``shutting_down``: hands the job back as soon as it is set. ``engine_wait``: the seconds for which a job that names
    none waits for an engine that does nothing for it; by default without end.
    """
    claim = await claims.claim(job_id)
    if claim is None:
        return
    job_id = claim.job_id
    # All log events of the job, also those of the search, carry its id and that of the request that submitted it.
    attributes: dict[str, tracing.Attribute] = {
        tracing.JOB_ID: job_id,
        tracing.ATTEMPT: claim.attempt,
        tracing.REQUEST_ID: claim.origin.request_id,
        tracing.STRATEGY: str(claim.spec["strategy"]["name"]),
    }
    with (
        bound_contextvars(job=job_id, attempt=claim.attempt, request_id=claim.origin.request_id),
        tracing.span("attempt", "consumer", attributes, find_job_span(job_id, claim.origin.traceparent)),
    ):
        log.info("job claimed")
        # Kept for the whole claim: grants of a batch may follow each other faster than heartbeats.
        with leases.keep(claim) as held:
            try:
                active: Claim | None = claim
                while active is not None:
                    search = _run_search(active, store, engine=engine, run=run, shutting_down=shutting_down, held=held)
                    active = await _record_outcome(active, store, search, engine_wait)
            except LeaseLost:
                log.warning("lease lost: another worker has the job")
            except BROKER_DOWN as error:
                # The journal is safe; the next claim continues from it.
                log.error("broker lost: the job is handed back once it answers", error=describe_outage(error))
                await _hand_back_late(claim, store, shutting_down)


async def _record_outcome(
    claim: Claim, store: JobStore, search: Awaitable[JobOutcome], engine_wait: float | None
) -> Claim | None:
    """Await the search and record its outcome. Return a claim to continue with if more tokens were granted."""
    try:
        outcome = await search
    except (LeaseLost, *BROKER_DOWN):
        raise
    except JobCancelled as end:
        await store.finish(claim, "cancelled", result=end.result)
        log.info("job cancelled")
        tracing.describe({tracing.STATUS: "cancelled"})
    except WaitingForBudget as waiting:
        try:
            share = await BatchStore(store).wait_for_budget(claim, waiting.request)
        except JobCancelled:
            log.info("job cancelled")
            tracing.describe({tracing.STATUS: "cancelled"})
            return None
        if share is not None:
            return replace(claim, share=share, has_journal=True)
        log.info("job waits for its share")
    except ShutdownRequested:
        await store.release(claim, reason="shutdown", detail="the worker was asked to stop")
        log.info("job handed back")
    except EngineUnavailable as error:
        await _wait_for_engine(claim, store, error, claim.spec.get("engine_wait_seconds") or engine_wait)
    except Exception as error:
        failure = _describe_failure(error)
        await store.finish(claim, "failed", error=failure)
        # Other messages may quote the problem, which must not be logged.
        is_model_missing = isinstance(error, InvalidRequest) and error.field in ("model", "verifier.model")
        extra = {"reason": failure.message} if is_model_missing else {}
        log.error("job failed", code=failure.code, exc_info=failure.code == "internal_error", **extra)
        tracing.describe({tracing.STATUS: "failed"})
    else:
        await store.finish(claim, outcome.status, result=outcome.result)
        log.info("job ended", status=outcome.status, tokens=outcome.usage.total)
        tracing.describe({tracing.STATUS: outcome.status})
    return None


async def _wait_for_engine(claim: Claim, store: JobStore, error: EngineUnavailable, patience: float | None) -> None:
    """Hand the job back until its engine answers, or end it if it has waited as long as it may."""
    # Other jobs may go on where an engine is busy, and it answers all the time: only the delay helps.
    reason = "engine_busy" if isinstance(error, EngineBusy) else "engine_unavailable"
    delay = max(ENGINE_RETRY_SECONDS, error.retry_after or 0.0)
    deadline = claim.spec.get("deadline")
    if deadline is not None:
        left = deadline - await store.get_broker_time()
        if left <= 0:
            await _end_without_engine(claim, store, f"the deadline has passed: {error}")
            return
        delay = min(delay, left)
    release = await store.release(claim, reason=reason, detail=str(error), delay=delay, patience=patience)
    if release.outcome != "exhausted":
        log.warning("no answer from the engine: job handed back", reason=reason, error=str(error), delay=delay)
        return
    waited = f"{release.waited:.0f} s and {release.count} attempts without anything from the engine"
    await _end_without_engine(claim, store, f"{waited}: {error}")


async def _end_without_engine(claim: Claim, store: JobStore, message: str) -> None:
    status, result, failure = await _find_end_with_best(claim, store, message)
    await store.finish(claim, status, result=result, error=failure)
    log.error("engine given up: job ended", status=status, reason=message)
    tracing.describe({tracing.STATUS: status})


async def _find_end_with_best(
    claim: Claim, store: JobStore, message: str
) -> tuple[Status, JobResult | None, JobError | None]:
    """Return the end of a job whose engine is given up: with what it has paid for, or as a failure without any."""
    spec = JobSpec.model_validate(claim.spec)
    entries = await RedisJournal(store, claim).load()
    best = choose_best_so_far(spec, entries)
    if best is None or not best.text:
        return "failed", None, JobError(code="engine_unavailable", message=message)
    shown = fold_events(entries).nodes[best.node or ""]
    status: Status = "completed" if shown.end_reason in ("answer", "stop") else "incomplete"
    return status, best.model_copy(update={"finish_reason": "engine_unavailable", "note": message}), None


async def _hand_back_late(claim: Claim, store: JobStore, shutting_down: asyncio.Event) -> None:
    """Release the job when the broker is back, however long that takes, so that the attempt does not count."""
    while not shutting_down.is_set():
        with contextlib.suppress(*BROKER_DOWN):
            detail = "the worker could not reach the broker"
            if await store.release(claim, reason="broker_unavailable", detail=detail):
                log.info("job handed back")
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BROKER_RETRY_SECONDS):
                await shutting_down.wait()
    log.warning("broker still away: the job is left to its lease")


async def _run_search(
    claim: Claim,
    store: JobStore,
    engine: EngineClient,
    run: RunJob,
    shutting_down: asyncio.Event,
    held: HeldLease,
) -> JobOutcome:
    """Run the search until it ends, the lease is lost or the worker shuts down."""
    journal = RedisJournal(store, claim)
    spec = JobSpec.model_validate(claim.spec)
    own_engine = TenantEngine(engine, claim.owner, is_background=spec.priority == "batch")
    search = asyncio.ensure_future(run(spec, own_engine, journal, cancelled=held.cancelled))
    ends = {asyncio.create_task(event.wait()) for event in (held.lost, shutting_down)}
    try:
        await asyncio.wait({search, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not search.done():
            search.cancel()
        # Let it commit what was in flight; heartbeats keep the lease meanwhile.
        await asyncio.gather(search, return_exceptions=True)
        if held.lost.is_set():
            raise LeaseLost(claim.job_id)
        if search.cancelled():
            raise ShutdownRequested
        return search.result()
    finally:
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)


def _describe_failure(error: Exception) -> JobError:
    match error:
        case PromptTooLong():
            return JobError(code="context_length_exceeded", message=str(error))
        case InvalidRequest():
            return JobError(code="invalid_request", message=str(error))
        case ContentFiltered():
            return JobError(code="content_filter", message=str(error))
        case EngineError():
            return JobError(code="engine_error", message=str(error))
        case JobRefused():
            return JobError(code="invalid_spec", message=f"this version cannot run the job: {error}")
        case ValidationError():
            problems = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
            return JobError(code="invalid_spec", message=f"this version cannot run the job: {problems}")
        case _:
            return JobError(code="internal_error", message=f"{type(error).__name__}: {error}")
