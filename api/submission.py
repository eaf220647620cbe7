"""How a job or a batch gets from a request into the store, whichever route it came by."""

from __future__ import annotations

import structlog

from api.caller import Caller
from api.effective import effective, effective_in_batch
from api.state import State
from reasoner.batches import BatchSpec
from reasoner.jobs import JobSpec
from workers.batches import BatchDocument, BatchStore
from workers.store import JobDocument

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
    accepted = await effective(spec, state.settings, state.catalog)
    job, created = await state.store.submit(
        accepted, owner=caller.owner, queue_cap=state.settings.queue_cap, idempotency=idempotency, form=form
    )
    state.reaper.nudge()
    log.info("job submitted" if created else "job submitted again", job=job["id"], key=caller.key_id)
    return job, created


async def submit_batch(
    spec: BatchSpec, caller: Caller, state: State, *, idempotency: tuple[str, str] | None = None
) -> tuple[BatchDocument, bool]:
    """The same for a batch."""
    jobs = [
        await effective_in_batch(job, number, state.settings, state.catalog) for number, job in enumerate(spec.jobs)
    ]
    batch, created = await BatchStore(state.store).submit(
        jobs,
        spec.budget.model_dump(),
        spec.metadata,
        owner=caller.owner,
        queue_cap=state.settings.queue_cap,
        idempotency=idempotency,
    )
    state.reaper.nudge()
    log.info("batch submitted" if created else "batch submitted again", batch=batch["id"], key=caller.key_id)
    return batch, created
