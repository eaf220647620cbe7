"""Submission of jobs and batches: resolve, apply limits, store. All routes that make jobs use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from api.http.limits import add_quota_budget, apply_caps, check_batch_budget, check_daily_tokens
from api.http.principal import Principal
from api.http.problems import Problem, refusal_problem
from api.http.state import ServiceState
from engine.protocol.request_checks import PromptTooLong
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.jobs.batch import BatchSpec, FileBatchSpec
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from workers.config.settings import Settings
from workers.store.batches import BatchDocument, BatchStore
from workers.store.file_batches import FileBatchStore, NewFileBatch
from workers.store.serialization import JobDocument
from workers.webhooks.http import ForbiddenAddress, check_address

log = structlog.get_logger("reasoner.api")


async def submit_job(
    request: JobRequest,
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
    settings = state.settings
    if (repeated := await state.store.find_repeated(principal.owner, idempotency)) is not None:
        return repeated, False
    job, is_new = await state.store.submit(
        await accept_job(request, principal, state),
        owner=principal.owner,
        queue_cap=settings.queue_cap,
        idempotency=idempotency,
        form=form,
        quota=settings.limits.for_owner(principal.owner).quota,
    )
    log.info("job submitted" if is_new else "job submitted again", job=job["id"], key=principal.key_id)
    return job, is_new


async def accept_job(
    request: JobRequest, principal: Principal, state: ServiceState, *, in_batch: bool = False
) -> dict[str, Any]:
    """Return the job of a request as it is stored, within its owner's limits; ``in_batch``: it shares a budget.

    Raises ``JobRefused`` or ``Problem`` for a job that cannot run or is not allowed.
    """
    settings = state.settings
    limits = settings.limits.for_owner(principal.owner)
    _check_webhook(request, settings)
    check_models(request, principal)
    resolved = await resolve_job(request, settings, state.catalog, in_batch=in_batch)
    accepted = apply_caps(resolved.model_dump(), request.budget, limits)
    for error in (await state.catalog.find_too_long([resolved])).values():
        raise _too_long(resolved, error)
    if not in_batch:
        check_daily_tokens(accepted["budget"], limits)
    return accepted if in_batch else add_quota_budget(accepted, limits, settings)


async def submit_file_batch(
    spec: FileBatchSpec, principal: Principal, state: ServiceState, *, idempotency: tuple[str, str] | None = None
) -> tuple[BatchDocument, bool]:
    """Store a batch whose requests are the lines of a file; return it, and True if it is new.

    Raises ``Problem`` or ``JobRefused`` if no line could become a job, and what ``FileBatchStore.submit`` raises.
    """
    settings = state.settings
    if (repeated := await BatchStore(state.store).find_repeated(principal.owner, idempotency)) is not None:
        return repeated, False
    await state.files.check_owner(spec.input_file_id, principal.visible_owner)
    purpose = (await state.files.get(spec.input_file_id))["purpose"]
    if purpose != "batch":
        message = f"the file has the purpose {purpose!r}: upload it with the purpose 'batch'"
        raise Problem(422, "invalid-request", f"input_file_id: {message}", errors=[("input_file_id", message)])
    defaults = spec.line_defaults
    await resolve_job(JobRequest(problem="?", **defaults), settings, state.catalog, in_batch=True)
    expiry = spec.output_expires_after
    batch = NewFileBatch(
        input_file_id=spec.input_file_id,
        endpoint=spec.endpoint,
        completion_window=spec.completion_window,
        window_seconds=min(spec.window_seconds, settings.retention_seconds),  # until then its jobs are kept
        metadata=spec.metadata or {},
        budget=None if spec.budget is None else spec.budget.model_dump(),
        line_defaults=defaults,
        output_seconds=settings.retention_seconds if expiry is None else expiry.seconds,
    )
    stored, is_new = await FileBatchStore(state.store).submit(
        batch,
        owner=principal.owner,
        key_id=principal.key_id,
        models=principal.models,
        idempotency=idempotency,
        quota=settings.limits.for_owner(principal.owner).quota,
    )
    log.info("batch submitted" if is_new else "batch submitted again", batch=stored["id"], key=principal.key_id)
    return stored, is_new


async def submit_batch(
    spec: BatchSpec, principal: Principal, state: ServiceState, *, idempotency: tuple[str, str] | None = None
) -> tuple[BatchDocument, bool]:
    """Store the resolved jobs of a batch; return the batch, and True if it is new. Raises as ``submit_job``."""
    settings = state.settings
    limits = settings.limits.for_owner(principal.owner)
    if (repeated := await BatchStore(state.store).find_repeated(principal.owner, idempotency)) is not None:
        return repeated, False
    check_batch_budget(spec.budget.model_dump(), len(spec.jobs), limits)
    jobs, problems, specs = [], list[tuple[int, Problem]](), list[JobSpec]()
    for index, job in enumerate(spec.jobs):
        try:
            _check_webhook(job, settings)
            check_models(job, principal)
            resolved = await resolve_job(job, settings, state.catalog, in_batch=True)
            jobs.append(apply_caps(resolved.model_dump(), job.budget, limits))
            specs.append(resolved)
        except JobRefused as refusal:
            problems.append((index, refusal_problem(refusal)))
        except Problem as problem:
            problems.append((index, problem))
    if not problems:
        too_long = await state.catalog.find_too_long(specs)
        problems = [(index, refusal_problem(_too_long(specs[index], error))) for index, error in too_long.items()]
    if problems:
        raise _batch_problem(problems)
    batch, is_new = await BatchStore(state.store).submit(
        jobs,
        spec.budget.model_dump(),
        spec.metadata,
        owner=principal.owner,
        queue_cap=settings.queue_cap,
        idempotency=idempotency,
        quota=limits.quota,
    )
    log.info("batch submitted" if is_new else "batch submitted again", batch=batch["id"], key=principal.key_id)
    return batch, is_new


def _too_long(spec: JobSpec, error: PromptTooLong) -> JobRefused:
    """Return the refusal of a question that is too long, with the words by which OpenAI's clients find it."""
    field = "problem" if spec.messages is None else "messages"
    return JobRefused("context-length-exceeded", field, f"the prompt is too long: {error}")


def _check_webhook(request: JobRequest, settings: Settings) -> None:
    if request.webhook is None:
        return
    try:
        if settings.webhook_secret is None:
            raise ForbiddenAddress("this service cannot sign webhooks: its operator must set REASONER_WEBHOOK_SECRET")
        check_address(request.webhook, settings.webhook_allow)
    except ForbiddenAddress as error:
        raise Problem(422, "impossible-webhook", f"webhook: {error}", errors=[("webhook", str(error))]) from None


def check_models(request: JobRequest, principal: Principal) -> None:
    """Raise ``Problem`` for a request that gives a model which its key may not use, or leaves the model open."""
    if principal.models is None:
        return
    given = {f"models.{index}.model": entry.model for index, entry in enumerate(request.models or ())}
    given = given or {"model": request.model or ""}
    if (judge := getattr(request.verifier, "model", None)) is not None:
        given["verifier.model"] = judge
    for field, word in given.items():
        check_word(field, word, principal)


def check_word(field: str, word: str, principal: Principal) -> None:
    """Raise ``Problem`` for a name or model that a key may not use; empty where a field leaves it open."""
    if principal.models is not None and not principal.may_use(word):
        wrong = f"may not use {word!r}" if word else "must name a model"
        message = f"a key limited to {', '.join(sorted(principal.models))} {wrong}"
        raise Problem(403, "model-not-allowed", f"{field}: {message}", errors=[(field, message)])


def _batch_problem(problems: Sequence[tuple[int, Problem]]) -> Problem:
    """Join the problems of a batch's jobs, each with the job's index, into one that names the fields of the batch."""
    errors = [
        (f"jobs.{index}" if error.field == "body" else f"jobs.{index}.{error.field}", error.message)
        for index, problem in problems
        for error in problem.errors
    ]
    first = problems[0][1]
    detail = "; ".join(f"{field}: {message}" for field, message in errors)
    return Problem(first.status_code, first.code, detail, errors=errors)
