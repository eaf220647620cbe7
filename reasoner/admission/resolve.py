"""The door of all jobs: a request becomes the job that runs. The fields come from ``sources``; ``check`` refuses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.protocol.types import EngineError, InvalidRequest, ModelInfo, SomeModelsAway
from reasoner.admission.check import check, check_spec
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.names import NameFault, find_model
from reasoner.admission.refusal import JobRefused
from reasoner.admission.sources import Merged, ServiceDefaults, Submission, merge_sources
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec, StrategySpec
from reasoner.jobs.verifier_specs import LanguageModelVerifier, ProbeVerifier
from reasoner.search.policies.call_format import find_model_format, resolve_python
from reasoner.search.policies.selection import verifier_selector
from reasoner.strategies.registry import parse_params


class ModelCatalog(Protocol):
    async def models(self) -> list[ModelInfo]:
        """Return the served models. Raises ``EngineError`` if no engine answers in time."""
        ...


async def resolve_job(
    request: JobRequest, service: ServiceDefaults, catalog: ModelCatalog, *, in_batch: bool = False
) -> JobSpec:
    """Return the job of a request to a service. Raises ``JobRefused`` if it cannot run.

    ``in_batch``: it shares a budget, so that its own is a cap. Names of models in it may be aliases.
    """
    now = time.time()
    if request.deadline is not None and request.deadline <= now:
        message = f"{request.deadline:.0f} has passed: give a later time in seconds since the epoch, now {now:.0f}"
        raise JobRefused("invalid-request", "deadline", message)
    answering, known, is_complete = await _list_models(catalog)
    served = [info.id for info in known]
    try:
        submission = Submission.to_service(request, service, known, in_batch=in_batch)
    except NameFault as fault:
        raise JobRefused("unknown-model", "model", f"the name {fault}") from None
    name = submission.name
    try:
        if name is not None and (field := name.find_change(request)) is not None:
            raise JobRefused("invalid-request", field, f"the name {name.name!r} fixes it: leave it out")
        merged = merge_sources(submission)
        spec = _replace_aliases(merged.spec, service, served)
        models = answering if is_complete or _list_needed(spec) <= {info.id for info in answering} else None
        spec = _complete(spec, models or ())
        check(Merged(spec, merged.origins), service, models)
    except JobRefused as refusal:
        if name is None or refusal.code != "unknown-model":
            raise
        message = f"the name {name.name!r} stands for {' and '.join(name.targets)}: {refusal}"
        raise JobRefused(refusal.code, "model", message) from None
    return spec


async def _list_models(catalog: ModelCatalog) -> tuple[list[ModelInfo], list[ModelInfo], bool]:
    """Return the models of the engines that answer, those of all that are known, and True if none is away."""
    try:
        models = await catalog.models()
    except SomeModelsAway as error:
        return error.known, [*error.known, *error.away], False
    except EngineError:
        return [], [], False
    return models, models, True


def _list_needed(spec: JobSpec) -> set[str]:
    """Return the models that a job names: it may wait for one whose engine is away."""
    verifier = verifier_selector(spec.verifier)
    return {*spec.policy_names, *([verifier.name] if verifier is not None and verifier.name is not None else [])}


def _replace_aliases(spec: JobSpec, service: ServiceDefaults, served: Sequence[str]) -> JobSpec:
    """Return the job with the models for which aliases stand that its verifier and its strategy name.

    Raises ``JobRefused``.
    """
    judge = getattr(spec.verifier, "model", None)
    if spec.verifier is not None and judge is not None:
        model = _find_model("verifier.model", judge, service, served)
        spec = spec.model_copy(update={"verifier": spec.verifier.model_copy(update={"model": model})})
    try:
        members = parse_params(spec.strategy.name, spec.strategy.params).members
    except ValueError:  # ``check`` says why
        return spec
    found = {part: _find_model(f"strategy.{part}", word, service, served) for part, word in members.items()}
    if not found:
        return spec
    strategy = StrategySpec(name=spec.strategy.name, **(spec.strategy.params | found))
    return spec.model_copy(update={"strategy": strategy})


def _find_model(field: str, word: str, service: ServiceDefaults, served: Sequence[str]) -> str:
    try:
        return find_model(word, service, served)
    except NameFault as fault:
        raise JobRefused("unknown-model", field, f"the name {fault}") from None


def resolve_program_job(request: JobRequest, models: Mapping[str, ModelDefaults] | None = None) -> JobSpec:
    """Return the job of a program that runs it itself, asked as a service with these settings of models asks it.

    It has all defaults of its model but the budget, the strategy and the verifier. Raises ``JobRefused`` if its fields
    contradict each other.
    """
    merged = merge_sources(Submission.to_program(request, models or {}))
    check_spec(merged)
    return merged.spec


def _complete(spec: JobSpec, models: Sequence[ModelInfo]) -> JobSpec:
    """Return the job with what its strategy and its served models know: ``check`` refuses where they do not."""
    changes: dict[str, Any] = {}
    name = spec.strategy.name
    try:
        changes["strategy"] = StrategySpec(name=name, **parse_params(name, spec.strategy.params).model_dump())
    except ValueError:
        return spec
    if isinstance(spec.verifier, ProbeVerifier | LanguageModelVerifier) and spec.verifier.model is None:
        changes["verifier"] = spec.verifier.model_copy(update={"model": spec.model})
    served = {info.id: info for info in models}
    policies = [served[policy] for policy in spec.policy_names if policy in served]
    if len(policies) < len(spec.policy_names):
        return spec.model_copy(update=changes)
    try:
        changes["tools"] = resolve_python(spec, policies).tools
        if spec.functions:
            changes["tool_format"] = find_model_format(spec, policies[0]).name
    except InvalidRequest:
        pass  # ``check`` says why
    return spec.model_copy(update=changes)


def describe_defaults(info: ModelInfo, service: ServiceDefaults, name: str | None = None) -> dict[str, Any]:
    """Return the values in use for the fields that a job of a served model leaves open, or one of a ``name`` for it."""
    spec = merge_sources(Submission.to_service(JobRequest(problem="?", model=name or info.id), service, [info])).spec
    prices = service.prices.get(info.id)
    return {
        "system": spec.system,
        "prompt": spec.prompt,
        "sampling": spec.sampling.model_dump(),
        "stop": spec.stop,
        "chat_template_kwargs": spec.chat_template_kwargs,
        "steps": spec.step_rule.model_dump(),
        "verifier": None if spec.verifier is None else spec.verifier.model_dump(),
        "answer": spec.answer.model_dump(),
        "strategy": spec.strategy.model_dump(),
        "budget": spec.budget.model_dump(exclude_none=True),
        "prices": None if prices is None else prices.model_dump() | {"source": service.price_sources[info.id]},
    }
