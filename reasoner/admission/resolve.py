"""The door of all jobs: a request becomes the job that runs. The fields come from ``sources``; ``check`` refuses."""

from __future__ import annotations

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
    models: list[ModelInfo] | None
    known: Sequence[ModelInfo]
    try:
        known = models = await catalog.models()
    except EngineError as error:
        models = None  # the job may wait for an engine
        known = error.known if isinstance(error, SomeModelsAway) else []
    try:
        submission = Submission.to_service(request, service, known, in_batch=in_batch)
    except NameFault as fault:
        raise JobRefused("unknown-model", "model", f"the name {fault}") from None
    name = submission.name
    try:
        if name is not None and (field := name.find_change(request)) is not None:
            raise JobRefused("invalid-request", field, f"the name {name.name!r} fixes it: leave it out")
        merged = merge_sources(submission)
        spec = _complete(_replace_alias(merged.spec, service), models or ())
        check(Merged(spec, merged.origins), service, models)
    except JobRefused as refusal:
        if name is None or refusal.code != "unknown-model":
            raise
        message = f"the name {name.name!r} stands for {' and '.join(name.targets)}: {refusal}"
        raise JobRefused(refusal.code, "model", message) from None
    return spec


def _replace_alias(spec: JobSpec, service: ServiceDefaults) -> JobSpec:
    """Return the job with the model for which an alias as its verifier's model stands. Raises ``JobRefused``."""
    judge = getattr(spec.verifier, "model", None)
    if spec.verifier is None or judge is None:
        return spec
    try:
        model = find_model(judge, service)
    except NameFault as fault:
        raise JobRefused("unknown-model", "verifier.model", f"the name {fault}") from None
    return spec.model_copy(update={"verifier": spec.verifier.model_copy(update={"model": model})})


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
