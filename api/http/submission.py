"""How a job or a batch gets from a request into the store, whichever route it came by."""

from __future__ import annotations

import structlog

from api.http.limits import batch_within, bookable, within
from api.http.principal import Caller
from api.http.resolve import effective, effective_in_batch, in_batch
from api.http.state import State
from reasoner.jobs.batch import BatchSpec
from reasoner.jobs.spec import JobSpec
from workers.store.batches import BatchDocument, BatchStore
from workers.store.serialization import JobDocument

log = structlog.get_logger("reasoner.api")


async def submit_job(
    spec: JobSpec,
    caller: Caller,
    state: State,
    *,
    idempotency: tuple[str, str] | None = None,
    form: str = "",
) -> tuple[JobDocument, bool]:
    """Records the job as it will run; answers it and whether it is new.

    ``idempotency`` is a client's key and its body's digest, ``form`` as in ``JobStore.submit``. Raises ``Problem`` for
    what cannot work or is not allowed, and what ``JobStore.submit`` raises.
    """
    settings, asked = state.settings, spec.budget
    limits = settings.limits.of(caller.owner)
    accepted = within(await effective(spec, settings, state.catalog), asked, limits)
    job, created = await state.store.submit(
        bookable(accepted, limits, settings),
        owner=caller.owner,
        queue_cap=settings.queue_cap,
        idempotency=idempotency,
        form=form,
        quota=limits.quota,
    )
    state.reaper.nudge()
    log.info("job submitted" if created else "job submitted again", job=job["id"], key=caller.key_id)
    return job, created


async def submit_batch(
    spec: BatchSpec, caller: Caller, state: State, *, idempotency: tuple[str, str] | None = None
) -> tuple[BatchDocument, bool]:
    """The same for a batch."""
    settings = state.settings
    limits = settings.limits.of(caller.owner)
    batch_within(spec.budget.model_dump(), len(spec.jobs), limits)
    jobs = []
    for place, job in enumerate(spec.jobs):
        with in_batch(place):
            asked = job.budget
            jobs.append(within(await effective_in_batch(job, settings, state.catalog), asked, limits))
    batch, created = await BatchStore(state.store).submit(
        jobs,
        spec.budget.model_dump(),
        spec.metadata,
        owner=caller.owner,
        queue_cap=settings.queue_cap,
        idempotency=idempotency,
        quota=limits.quota,
    )
    state.reaper.nudge()
    log.info("batch submitted" if created else "batch submitted again", batch=batch["id"], key=caller.key_id)
    return batch, created
