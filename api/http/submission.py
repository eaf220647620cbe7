"""Submission of jobs and batches: resolve, apply limits, store. All routes that make jobs use it."""

from __future__ import annotations

import structlog

from api.http.limits import add_quota_budget, apply_caps, check_batch_budget
from api.http.principal import Principal
from api.http.resolve import effective, effective_in_batch, in_batch
from api.http.state import ServiceState
from reasoner.jobs.batch import BatchSpec
from reasoner.jobs.spec import JobSpec
from workers.store.batches import BatchDocument, BatchStore
from workers.store.serialization import JobDocument

log = structlog.get_logger("reasoner.api")


async def submit_job(
    spec: JobSpec,
    principal: Principal,
    state: ServiceState,
    *,
    idempotency: tuple[str, str] | None = None,
    form: str = "",
) -> tuple[JobDocument, bool]:
    """Store the resolved job; return it, and True if it is new.

    ``idempotency`` is the client's key with the digest of its body, ``form`` as in ``JobStore.submit``. Raises
    ``Problem`` for a job that cannot run or is not allowed, and what ``JobStore.submit`` raises.
    """
    settings, requested = state.settings, spec.budget
    limits = settings.limits.of(principal.owner)
    resolved = apply_caps(await effective(spec, settings, state.catalog), requested, limits)
    job, is_new = await state.store.submit(
        add_quota_budget(resolved, limits, settings),
        owner=principal.owner,
        queue_cap=settings.queue_cap,
        idempotency=idempotency,
        form=form,
        quota=limits.quota,
    )
    state.reaper.nudge()
    log.info("job submitted" if is_new else "job submitted again", job=job["id"], key=principal.key_id)
    return job, is_new


async def submit_batch(
    spec: BatchSpec, principal: Principal, state: ServiceState, *, idempotency: tuple[str, str] | None = None
) -> tuple[BatchDocument, bool]:
    """Store the resolved jobs of a batch; return the batch, and True if it is new. Raises as ``submit_job``."""
    settings = state.settings
    limits = settings.limits.of(principal.owner)
    check_batch_budget(spec.budget.model_dump(), len(spec.jobs), limits)
    jobs = []
    for index, job in enumerate(spec.jobs):
        with in_batch(index):
            requested = job.budget
            jobs.append(apply_caps(await effective_in_batch(job, settings, state.catalog), requested, limits))
    batch, is_new = await BatchStore(state.store).submit(
        jobs,
        spec.budget.model_dump(),
        spec.metadata,
        owner=principal.owner,
        queue_cap=settings.queue_cap,
        idempotency=idempotency,
        quota=limits.quota,
    )
    state.reaper.nudge()
    log.info("batch submitted" if is_new else "batch submitted again", batch=batch["id"], key=principal.key_id)
    return batch, is_new
