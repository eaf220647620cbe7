"""The job as it will run: what the client left open is decided here, once, and echoed."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from api.http.model_catalog import Catalog
from api.http.problems import Problem
from engine.protocol.types import EngineError, InvalidRequest, ModelInfo
from reasoner.admission.defaults import apply_defaults
from reasoner.admission.effort import apply_effort
from reasoner.budget.prices import check_budget
from reasoner.budget.spec import Budget
from reasoner.jobs.spec import FALLBACK_STRATEGY, JobSpec, StrategySpec
from reasoner.jobs.verifier_specs import JudgeVerifier, PrmVerifier
from reasoner.search.model_selection import Wanted, wanted_policy, wanted_verifier
from reasoner.strategies.registry import STRATEGIES, parse_params
from workers.config.settings import Settings
from workers.webhooks.http import ForbiddenAddress, check_address


async def effective(spec: JobSpec, settings: Settings, catalog: Catalog) -> dict[str, Any]:
    """The specification with models, budget, parameters and seed filled in. Raises ``Problem`` for what cannot work."""
    spec = _with_defaults(with_verifier(spec, settings), settings)
    if spec.budget == Budget():
        budget = Budget(tokens=settings.budget_tokens, seconds=settings.budget_seconds)
        spec = spec.model_copy(update={"budget": budget})
    return await _filled(spec, settings, catalog)


async def effective_in_batch(spec: JobSpec, settings: Settings, catalog: Catalog) -> dict[str, Any]:
    """The same for a job that shares a budget: one of its own is a cap, and it is in no hurry unless it says so."""
    if "priority" not in spec.model_fields_set:
        spec = spec.model_copy(update={"priority": "batch"})
    spec = _with_defaults(with_verifier(spec, settings), settings).model_copy(update={"budget": spec.budget})
    return await _filled(spec, settings, catalog)


def with_verifier(spec: JobSpec, settings: Settings) -> JobSpec:
    """Return the job, without a verifier if it leaves that to a service that has none. Raise ``Problem`` where the job
    needs one."""
    if settings.prm_name is not None or not isinstance(spec.verifier, PrmVerifier) or spec.verifier.model is not None:
        return spec
    name = spec.strategy.name
    if "strategy" in spec.model_fields_set and STRATEGIES[name].needs_verifier:
        message = (
            f"strategy {name!r} needs a verifier, and this service has no process reward model of its own: give the "
            f"job a 'verifier', such as a rule or a judge, or use {FALLBACK_STRATEGY}; "
            "the operator may set REASONER_PRM"
        )
        raise Problem(422, "no-verifier", message, errors=[("strategy", message)])
    if "verifier" in spec.model_fields_set:
        message = "this service has no process reward model of its own: name a served 'model', or another 'kind'"
        raise Problem(422, "no-verifier", f"verifier: {message}", errors=[("verifier", message)])
    return JobSpec.model_validate(spec.model_dump(exclude_unset=True) | {"verifier": None})


@contextlib.contextmanager
def in_batch(place: int) -> Iterator[None]:
    """A ``Problem`` that is raised in here names the fields of a batch's job: ``place`` is its number."""
    try:
        yield
    except Problem as problem:
        errors = [(f"jobs.{place}.{error.field}", error.message) for error in problem.errors]
        detail = f"jobs.{place}: {problem.detail}"
        raise Problem(problem.status_code, problem.code, detail, errors=errors) from None


async def _filled(spec: JobSpec, settings: Settings, catalog: Catalog) -> dict[str, Any]:
    _check_webhook(spec, settings)
    spec = _with_effort(spec, settings)
    served = await _served(spec, catalog)
    _check_models(spec, served)
    _check_budget(spec, settings, served)
    parameters = parse_params(spec.strategy.name, spec.strategy.params).model_dump()
    spec.strategy = StrategySpec.model_validate({"name": spec.strategy.name, **parameters})
    spec.model = spec.model or settings.model_name
    match spec.verifier:
        case PrmVerifier():
            spec.verifier.model = spec.verifier.model or settings.prm_name
        case JudgeVerifier():
            spec.verifier.model = spec.verifier.model or spec.model
    if spec.seed is None:
        spec.seed = secrets.randbelow(2**53)  # survives the doubles of JavaScript
    return spec.model_dump()


def _with_defaults(spec: JobSpec, settings: Settings) -> JobSpec:
    defaults = settings.models.get(spec.model or settings.model_name)
    if defaults is None:
        return spec
    try:
        return apply_defaults(spec, defaults, settings.effort)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        message = f"{reason}; this strategy is the model's default here: name another one"
        raise Problem(422, "invalid-request", f"strategy: {message}", errors=[("strategy", message)]) from None


def _with_effort(spec: JobSpec, settings: Settings) -> JobSpec:
    try:
        return apply_effort(spec, settings.effort)
    except InvalidRequest as error:
        raise _refusal(error) from None


def _named(spec: JobSpec) -> list[Wanted]:
    """The models that the client names."""
    asked = (wanted_policy(spec), wanted_verifier(spec.verifier))
    return [wanted for wanted in asked if wanted is not None and wanted.name is not None]


async def _served(spec: JobSpec, catalog: Catalog) -> list[ModelInfo] | None:
    """``None`` when nothing depends on it, and while the engine is not there to say: a job may wait for an engine."""
    if not _named(spec) and spec.budget.flops is None:
        return None
    try:
        return await catalog.models()
    except EngineError:
        return None


def _check_models(spec: JobSpec, models: list[ModelInfo] | None) -> None:
    if models is None:
        return
    for wanted in _named(spec):
        try:
            wanted.find(models)
        except InvalidRequest as error:
            raise Problem(422, "unknown-model", str(error), errors=[(wanted.field, str(error))]) from None


def _check_budget(spec: JobSpec, settings: Settings, models: list[ModelInfo] | None) -> None:
    model = spec.model or settings.model_name
    info = next((info for info in models or () if info.id == model), None)
    try:
        check_budget(spec.budget, model, info, settings.prices)
    except InvalidRequest as error:
        raise _refusal(error) from None


def _check_webhook(spec: JobSpec, settings: Settings) -> None:
    if spec.webhook is None:
        return
    try:
        if settings.webhook_secret is None:
            raise ForbiddenAddress("this service has no secret to sign webhooks with: its operator has to set one")
        check_address(spec.webhook, settings.webhook_allow)
    except ForbiddenAddress as error:
        raise Problem(422, "impossible-webhook", f"webhook: {error}", errors=[("webhook", str(error))]) from None


def _refusal(error: InvalidRequest) -> Problem:
    field = error.field or "budget"
    message = str(error).removeprefix(f"{field}: ")
    return Problem(422, "impossible-budget", f"{field}: {message}", errors=[(field, message)])
