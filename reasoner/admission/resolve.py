"""Resolve a job once, when it is accepted: fill in the fields that the client left open, and refuse invalid jobs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from engine.protocol.types import EngineError, InvalidRequest, ModelInfo
from reasoner.admission.defaults import ModelDefaults, apply_defaults
from reasoner.admission.effort import Effort, apply_effort
from reasoner.admission.validation import JobRefused, check_job
from reasoner.budget.prices import Prices, check_budget
from reasoner.budget.spec import Budget
from reasoner.jobs.spec import FALLBACK_STRATEGY, JobSpec, StrategySpec
from reasoner.jobs.verifier_specs import JudgeVerifier, PrmVerifier
from reasoner.search.model_selection import ModelSelector, policy_selector, verifier_selector
from reasoner.strategies.registry import STRATEGIES, parse_params


class ServiceDefaults(Protocol):
    """The part of a service's configuration that supplies defaults for jobs."""

    @property
    def model_name(self) -> str: ...
    @property
    def prm_name(self) -> str | None: ...
    @property
    def budget_tokens(self) -> int: ...
    @property
    def budget_seconds(self) -> float: ...
    @property
    def models(self) -> Mapping[str, ModelDefaults]: ...
    @property
    def effort(self) -> Mapping[str, Effort]: ...
    @property
    def prices(self) -> Mapping[str, Prices]: ...


class ModelCatalog(Protocol):
    async def models(self) -> list[ModelInfo]:
        """Return the served models. Raises ``EngineError`` if no engine answers in time."""
        ...


async def resolve_job(spec: JobSpec, service: ServiceDefaults, catalog: ModelCatalog) -> JobSpec:
    """Return the job with models, budget, parameters and seed filled in. Raises ``JobRefused`` if it cannot run."""
    spec = _apply_model_defaults(use_available_verifier(spec, service), service)
    if spec.budget == Budget():
        budget = Budget(tokens=service.budget_tokens, seconds=service.budget_seconds)
        spec = spec.model_copy(update={"budget": budget})
    return await _complete(spec, service, catalog)


async def resolve_batch_job(spec: JobSpec, service: ServiceDefaults, catalog: ModelCatalog) -> JobSpec:
    """Resolve a job that shares a budget: its own budget is a cap, and its priority is ``batch`` by default."""
    if "priority" not in spec.model_fields_set:
        spec = spec.model_copy(update={"priority": "batch"})
    with_defaults = _apply_model_defaults(use_available_verifier(spec, service), service)
    return await _complete(with_defaults.model_copy(update={"budget": spec.budget}), service, catalog)


def use_available_verifier(spec: JobSpec, service: ServiceDefaults) -> JobSpec:
    """Check the job, and return it without a verifier if it leaves the choice open and the service has none.

    Raises ``JobRefused`` for a job that cannot run, or that needs a verifier.
    """
    check_job(spec)
    if service.prm_name is not None or not isinstance(spec.verifier, PrmVerifier) or spec.verifier.model is not None:
        return spec
    name = spec.strategy.name
    if "strategy" in spec.model_fields_set and STRATEGIES[name].needs_verifier:
        message = (
            f"strategy {name!r} needs a verifier, and this service has no process reward model of its own: give the "
            f"job a 'verifier', such as a rule or a judge, or use {FALLBACK_STRATEGY}; "
            "the operator may set REASONER_PRM"
        )
        raise JobRefused("no-verifier", "strategy", message)
    if "verifier" in spec.model_fields_set:
        message = "this service has no process reward model of its own: name a served 'model', or another 'kind'"
        raise JobRefused("no-verifier", "verifier", message)
    return JobSpec.model_validate(spec.model_dump(exclude_unset=True) | {"verifier": None})


async def _complete(spec: JobSpec, service: ServiceDefaults, catalog: ModelCatalog) -> JobSpec:
    """Apply the effort, check models and budget, and fill in all fields that are still open."""
    try:
        spec = apply_effort(spec, service.effort)
    except InvalidRequest as error:
        raise _impossible_budget(error) from None
    try:
        models: list[ModelInfo] | None = await catalog.models()
    except EngineError:
        models = None  # the job may wait for an engine
    _check_models(spec, models)
    _check_budget(spec, service, models)
    name = spec.strategy.name
    model = spec.model or service.model_name
    changes: dict[str, Any] = {
        "strategy": StrategySpec(name=name, **parse_params(name, spec.strategy.params).model_dump()),
        "model": model,
    }
    match spec.verifier:
        case PrmVerifier(model=None):
            changes["verifier"] = spec.verifier.model_copy(update={"model": service.prm_name})
        case JudgeVerifier(model=None):
            changes["verifier"] = spec.verifier.model_copy(update={"model": model})
    info = next((info for info in models or () if info.id == model), None)
    if info is not None:
        changes["sampling"] = spec.sampling.fill(info.sampling)
    if spec.seed is None:
        changes["seed"] = secrets.randbelow(2**53)  # exact as a JavaScript number
    return spec.model_copy(update=changes)


def _apply_model_defaults(spec: JobSpec, service: ServiceDefaults) -> JobSpec:
    defaults = service.models.get(spec.model or service.model_name)
    if defaults is None:
        return spec
    spec = apply_defaults(spec, defaults, service.effort)
    try:
        check_job(spec)
    except JobRefused as refusal:
        message = f"{refusal.message}; this strategy is the model's default here: name another one"
        raise JobRefused("invalid-request", "strategy", message) from None
    return spec


def _named_models(spec: JobSpec) -> list[ModelSelector]:
    """Return the selectors of the models that the client names."""
    selectors = (policy_selector(spec), verifier_selector(spec.verifier))
    return [selector for selector in selectors if selector is not None and selector.name is not None]


def _check_models(spec: JobSpec, models: list[ModelInfo] | None) -> None:
    if models is None:
        return
    for selector in _named_models(spec):
        try:
            selector.find(models)
        except InvalidRequest as error:
            raise JobRefused("unknown-model", selector.field, str(error)) from None


def _check_budget(spec: JobSpec, service: ServiceDefaults, models: list[ModelInfo] | None) -> None:
    model = spec.model or service.model_name
    info = next((info for info in models or () if info.id == model), None)
    try:
        check_budget(spec.budget, model, info, service.prices)
    except InvalidRequest as error:
        raise _impossible_budget(error) from None


def _impossible_budget(error: InvalidRequest) -> JobRefused:
    field = error.field or "budget"
    return JobRefused("impossible-budget", field, str(error).removeprefix(f"{field}: "))
