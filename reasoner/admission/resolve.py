"""Resolve a job once, when it is accepted: fill in the fields that the client left open, and refuse invalid jobs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.protocol.types import EngineError, InvalidRequest, ModelInfo
from reasoner.admission.constraints import check_constraint, check_schema
from reasoner.admission.defaults import ModelDefaults, apply_defaults
from reasoner.admission.effort import Effort, apply_effort
from reasoner.admission.policy_checks import find_refusal
from reasoner.admission.prompt import add_instruction
from reasoner.admission.validation import JobRefused, check_job
from reasoner.base_model import VerifierSpec
from reasoner.budget.prices import Prices, check_budget
from reasoner.budget.spec import Budget
from reasoner.jobs.spec import COMPARING_STRATEGY, FALLBACK_STRATEGY, JobSpec, StrategySpec
from reasoner.jobs.tool_specs import FunctionTool
from reasoner.jobs.verifier_specs import JudgeVerifier, PairwiseVerifier, PrmVerifier, ProbeVerifier, WrittenVerifier
from reasoner.search.policies.call_format import find_model_format, resolve_python
from reasoner.search.policies.forced_calls import can_force, list_forced, make_schema
from reasoner.search.policies.selection import ModelSelector, policy_selectors, verifier_selector
from reasoner.strategies.registry import STRATEGIES, parse_params


class ServiceDefaults(Protocol):
    """The part of a service's configuration that supplies defaults for jobs."""

    @property
    def model_name(self) -> str: ...
    @property
    def budget_tokens(self) -> int: ...
    @property
    def budget_seconds(self) -> float: ...
    @property
    def models(self) -> Mapping[str, ModelDefaults]: ...
    def default_verifier(self, model: str) -> VerifierSpec | None:
        """Return the verifier of jobs of a model that name none."""
        ...

    @property
    def effort(self) -> Mapping[str, Effort]: ...
    @property
    def prices(self) -> Mapping[str, Prices]: ...
    @property
    def price_sources(self) -> Mapping[str, str]: ...


class ModelCatalog(Protocol):
    async def models(self) -> list[ModelInfo]:
        """Return the served models. Raises ``EngineError`` if no engine answers in time."""
        ...


async def resolve_job(spec: JobSpec, service: ServiceDefaults, catalog: ModelCatalog) -> JobSpec:
    """Return the job with models, budget, parameters and seed filled in. Raises ``JobRefused`` if it cannot run."""
    spec = _apply_model_defaults(use_available_verifier(spec, service), service)
    default = Budget(tokens=service.budget_tokens, seconds=service.budget_seconds)
    spec = spec.model_copy(update={"budget": spec.budget.or_default(default)})
    return await _complete(spec, service, catalog)


async def resolve_batch_job(spec: JobSpec, service: ServiceDefaults, catalog: ModelCatalog) -> JobSpec:
    """Resolve a job that shares a budget: its own budget is a cap, and its priority is ``batch`` by default."""
    if "priority" not in spec.model_fields_set:
        spec = spec.model_copy(update={"priority": "batch"})
    with_defaults = _apply_model_defaults(use_available_verifier(spec, service), service)
    return await _complete(with_defaults.model_copy(update={"budget": spec.budget}), service, catalog)


def use_available_verifier(spec: JobSpec, service: ServiceDefaults) -> JobSpec:
    """Check the job, and return it with its model's verifier, or without one, if it leaves the choice open.

    A process reward model is named when the job is resolved. Raises ``JobRefused`` for a job that cannot run, or that
    needs a verifier.
    """
    check_job(spec)
    model = spec.model or service.model_name
    default = service.default_verifier(model)
    if "verifier" not in spec.model_fields_set and (
        spec.compares or _find_strategy(spec, service) == COMPARING_STRATEGY
    ):
        compares = default is not None and default.compares
        return spec.model_copy(update={"verifier": default if compares else PairwiseVerifier()})
    if not isinstance(spec.verifier, PrmVerifier) or spec.verifier.model is not None:
        return spec
    if isinstance(default, PrmVerifier):
        return spec
    if "verifier" in spec.model_fields_set:
        message = f"model {model!r} has no process reward model by default: name a served 'model', or another 'kind'"
        raise JobRefused("no-verifier", "verifier", message)
    name = spec.strategy.name
    use = STRATEGIES[name].verifier_use(parse_params(name, spec.strategy.params))
    if default is None and "strategy" in spec.model_fields_set and use.needs_scores:
        message = (
            f"strategy {name!r} needs a verifier, and model {model!r} has none by default: give the job a 'verifier', "
            f"such as a rule or a judge, or use {FALLBACK_STRATEGY}; the operator may set REASONER_PRM, or 'verifier' "
            f"in [models.{model}]"
        )
        raise JobRefused("no-verifier", "strategy", message)
    changes = {"verifier": None if default is None else default.model_dump()}
    spec = JobSpec.model_validate(spec.model_dump(exclude_unset=True) | changes)
    return _check_default(spec, "verifier")


def _find_strategy(spec: JobSpec, service: ServiceDefaults) -> str:
    """Return the name of the job's strategy, by its effort or the model's defaults if it leaves the choice open."""
    if "strategy" in spec.model_fields_set:
        return spec.strategy.name
    effort = service.effort.get(spec.budget.effort or "")
    defaults = service.models.get(spec.model or service.model_name)
    chosen = (effort and effort.strategy) or (defaults and defaults.strategy)
    return chosen.name if chosen else spec.strategy.name


async def _complete(spec: JobSpec, service: ServiceDefaults, catalog: ModelCatalog) -> JobSpec:
    """Apply the effort, check models and budget, and fill in all fields that are still open."""
    if spec.constraint is not None:
        check_constraint(spec.constraint)
    try:
        spec = add_instruction(apply_effort(spec, service.effort))
    except InvalidRequest as error:
        raise _impossible_budget(error) from None
    try:
        models: list[ModelInfo] | None = await catalog.models()
    except EngineError:
        models = None  # the job may wait for an engine
    model = spec.model or service.model_name
    if isinstance(spec.verifier, ProbeVerifier) and spec.verifier.model is None:
        spec = spec.model_copy(update={"verifier": spec.verifier.model_copy(update={"model": model})})
    spec = spec.model_copy(update={"model": model})
    _check_models(spec, models)
    _check_servers(spec, models)
    _check_budget(spec, service, models)
    name = spec.strategy.name
    changes: dict[str, Any] = {
        "strategy": StrategySpec(name=name, **parse_params(name, spec.strategy.params).model_dump()),
        "model": model,
    }
    match spec.verifier:
        case PrmVerifier(model=None):
            default = service.default_verifier(model)
            assert isinstance(default, PrmVerifier)  # else ``use_available_verifier`` has replaced it
            given = {name: getattr(spec.verifier, name) for name in spec.verifier.model_fields_set}
            changes["verifier"] = default.model_copy(update=given | {"model": default.model})
        case JudgeVerifier(model=None) | WrittenVerifier(model=None):
            changes["verifier"] = spec.verifier.model_copy(update={"model": model})
    info = next((info for info in models or () if info.id == model), None)
    if info is not None and spec.models is None:  # several models have their own parameters each
        changes["sampling"] = spec.sampling.fill(info.sampling)
    if info is not None and spec.functions:
        changes["tool_format"] = _find_tool_format(spec, info)
    if len(policies := _policies(spec, models)) == len(policy_selectors(spec)):
        changes["tools"] = _resolve_tools(spec, policies).tools
    if spec.seed is None:
        changes["seed"] = secrets.randbelow(2**53)  # exact as a JavaScript number
    return spec.model_copy(update=changes)


def _find_tool_format(spec: JobSpec, policy: ModelInfo) -> str:
    """Return the name of the format in which a policy writes calls. Raises ``JobRefused`` if it is not known."""
    try:
        return find_model_format(spec, policy).name
    except InvalidRequest as error:
        raise JobRefused("unsupported-tool", error.field, str(error)) from None


def _resolve_tools(spec: JobSpec, policies: Sequence[ModelInfo]) -> JobSpec:
    """Return the job with the format of its models' own calls of Python.

    Raises ``JobRefused`` if one has another, or, with its path, for a schema to which demanded calls cannot be held.
    """
    try:
        spec = resolve_python(spec, policies)
        forced = list_forced(spec)
        if not can_force(spec, policies, STRATEGIES[spec.strategy.name].constraint_needs):
            return spec
    except InvalidRequest as error:
        raise JobRefused("unsupported-tool", error.field, str(error)) from None
    for index, tool in enumerate(spec.tools):
        if isinstance(tool, FunctionTool) and tool in forced:
            check_schema(make_schema(tool), f"tools.{index}.parameters")
    return spec


def _apply_model_defaults(spec: JobSpec, service: ServiceDefaults) -> JobSpec:
    defaults = service.models.get(spec.model or service.model_name)
    if defaults is None:
        return spec
    return _check_default(apply_defaults(spec, defaults, service.effort), "strategy")


def _check_default(spec: JobSpec, field: str) -> JobSpec:
    """Return the job, whose ``field`` is the model's default. Raises ``JobRefused`` if that does not fit the job."""
    try:
        check_job(spec)
    except JobRefused as refusal:
        message = f"{refusal.message}; this {field} is the model's default here: name another one"
        raise JobRefused("invalid-request", field, message) from None
    return spec


def describe_defaults(info: ModelInfo, service: ServiceDefaults) -> dict[str, Any]:
    """Return the values in use for the fields that a job of a served model leaves open."""
    spec = use_available_verifier(JobSpec(problem="?", model=info.id), service)
    spec = add_instruction(_apply_model_defaults(spec, service))
    verifier = spec.verifier if spec.verifier is None else service.default_verifier(info.id)
    prices = service.prices.get(info.id)
    budget = spec.budget.or_default(Budget(tokens=service.budget_tokens, seconds=service.budget_seconds))
    return {
        "system": spec.system,
        "prompt": spec.prompt,
        "sampling": spec.sampling.fill(info.sampling).model_dump(),
        "stop": spec.stop,
        "chat_template_kwargs": spec.chat_template_kwargs,
        "steps": spec.step_rule.model_dump(),
        "verifier": None if verifier is None else verifier.model_dump(),
        "answer": spec.answer.model_dump(),
        "strategy": spec.strategy.model_dump(),
        "budget": budget.model_dump(exclude_none=True),
        "prices": None if prices is None else prices.model_dump() | {"source": service.price_sources[info.id]},
    }


def _named_models(spec: JobSpec) -> list[ModelSelector]:
    """Return the selectors of the models that the client names."""
    selectors = [*(selector for selector, _ in policy_selectors(spec)), verifier_selector(spec.verifier)]
    return [selector for selector in selectors if selector is not None and selector.name is not None]


def _check_models(spec: JobSpec, models: list[ModelInfo] | None) -> None:
    if models is None:
        return
    for selector in _named_models(spec):
        try:
            selector.find(models)
        except InvalidRequest as error:
            raise JobRefused("unknown-model", selector.field, str(error)) from None


def _check_servers(spec: JobSpec, models: list[ModelInfo] | None) -> None:
    """Raise ``JobRefused`` for a job that needs more than the server of a policy can do."""
    for policy in _policies(spec, models):
        if (refusal := find_refusal(spec, policy)) is not None:
            raise refusal


def _check_budget(spec: JobSpec, service: ServiceDefaults, models: list[ModelInfo] | None) -> None:
    served = {info.id: info for info in models or ()}
    for selector, _ in policy_selectors(spec):
        assert selector.name is not None  # filled in by the caller
        try:
            check_budget(spec.budget, selector.name, served.get(selector.name), service.prices)
        except InvalidRequest as error:
            raise _impossible_budget(error) from None


def _policies(spec: JobSpec, models: list[ModelInfo] | None) -> list[ModelInfo]:
    """Return those of the job's policies that are known to be served."""
    names = {selector.name for selector, _ in policy_selectors(spec)}
    return [info for info in models or () if info.id in names]


def _impossible_budget(error: InvalidRequest) -> JobRefused:
    field = error.field or "budget"
    return JobRefused("impossible-budget", field, str(error).removeprefix(f"{field}: "))
