"""The check of a resolved job: whether its fields fit together, and whether the servers of its models can do it.

A rule on a single field is the field's own type; one on what a client may say at all is a validator of the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol.types import InvalidRequest, ModelInfo
from reasoner.admission.constraints import check_constraint, check_schema
from reasoner.admission.effort import find_contradiction
from reasoner.admission.policy_checks import find_refusal
from reasoner.admission.refusal import JobRefused
from reasoner.admission.sources import (
    EFFORT,
    MODEL,
    MODEL_EFFORT,
    MODEL_VERIFIER,
    REQUEST,
    Merged,
    ServiceDefaults,
)
from reasoner.answers.spec import CodeExtract
from reasoner.budget.prices import check_budget
from reasoner.jobs.spec import COMPARING_STRATEGY, FALLBACK_STRATEGY, SELECTING_STRATEGY, JobSpec
from reasoner.jobs.tool_specs import FunctionTool
from reasoner.jobs.verifier_specs import PrmVerifier, ProbeVerifier, verifier_kinds
from reasoner.search.policies.call_format import find_model_format, resolve_python
from reasoner.search.policies.forced_calls import can_force, list_forced, make_schema
from reasoner.search.policies.selection import policy_selectors, verifier_selector
from reasoner.strategies.base import Feature, Params, Strategy, VerifierUse
from reasoner.strategies.registry import STRATEGIES, parse_params
from reasoner.tools.fences import PYTHON_NAMES

_OWNERS = {MODEL: "model's default", MODEL_VERIFIER: "model's default", MODEL_EFFORT: "model's default"}
_OWNERS[EFFORT] = "effort's"
"""The owner of a value, by the source that it is from; values of other sources are the client's or the schema's."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A contradiction between fields of a job."""

    message: str
    field: str | None = None
    code: str = "invalid-request"
    about: Sequence[str] = ()
    """The fields of which a client may name another value, where the one at fault is a default."""


def check(merged: Merged, service: ServiceDefaults, models: Sequence[ModelInfo] | None) -> None:
    """Raise ``JobRefused``, with a correction, for a job that cannot run in a service.

    ``models`` are those that are served; ``None`` as long as no engine answers.
    """
    spec = merged.spec
    check_spec(merged, _find_missing_verifier(merged))
    if spec.constraint is not None:
        check_constraint(spec.constraint)
    try:
        if (contradiction := find_contradiction(spec.budget, service.effort)) is not None:
            raise contradiction
        _check_models(merged, models)
        served = {info.id: info for info in models or ()}
        for name in spec.policy_names:
            check_budget(spec.budget, name, served.get(name), service.prices)
    except InvalidRequest as error:
        field = error.field or "budget"
        raise JobRefused("impossible-budget", field, str(error).removeprefix(f"{field}: ")) from None
    if models is not None:
        _check_tool_formats(spec, [served[name] for name in spec.policy_names])


def check_spec(merged: Merged, *more: Fault | None) -> None:
    """Raise ``JobRefused`` for a job whose fields contradict each other, or have one of the faults ``more``."""
    rules = (rule(merged.spec) for rule in _RULES)
    for fault in filter(None, itertools.chain(more, rules)):
        for name in fault.about:
            owner = _OWNERS.get(merged.origins.get(name, ""))
            if owner is not None:
                message = f"{fault.message}; this {name} is the {owner} here: name another one"
                raise JobRefused("invalid-request", name, message)
        raise JobRefused(fault.code, fault.field, fault.message)


def parse_strategy(spec: JobSpec) -> tuple[Strategy[Any], Params]:
    """Return the job's strategy and its parameters. Raises ``JobRefused`` for one that this version does not have."""
    fault = _check_strategy(spec)
    if fault is not None:
        raise JobRefused(fault.code, fault.field, fault.message)
    return STRATEGIES[spec.strategy.name], parse_params(spec.strategy.name, spec.strategy.params)


def _check_last_message(spec: JobSpec) -> Fault | None:
    if not spec.messages or spec.messages[-1].role != "assistant":
        return None
    return Fault(
        "the last message is the assistant's, and a job writes the assistant's next one: end with a message of the "
        "user or a tool (a text that the assistant began is not continued)",
        "messages",
    )


def _check_strategy(spec: JobSpec) -> Fault | None:
    try:
        parse_params(spec.strategy.name, spec.strategy.params)
    except ValueError as error:
        return Fault(str(error), "strategy")
    return None


def _check_candidates(spec: JobSpec) -> Fault | None:
    name, candidates = spec.strategy.name, spec.candidates
    selects = name == SELECTING_STRATEGY
    if candidates is not None and not selects:
        return Fault(
            f"strategy {name!r} writes its own solutions: leave 'candidates' out, or use strategy "
            f"{SELECTING_STRATEGY!r}"
        )
    if selects and candidates is None:
        return Fault(f"strategy {SELECTING_STRATEGY!r} needs 'candidates', the solutions to rank", about=["strategy"])
    if spec.strategy.params.get("by") == COMPARING_STRATEGY and candidates is not None and len(candidates) < 2:
        return Fault("candidates: a tournament needs two")
    return None


def _find_missing_verifier(merged: Merged) -> Fault | None:
    """Return the fault of a job that relies on a verifier of its model or its service, where there is none."""
    spec, name = merged.spec, merged.spec.strategy.name
    if isinstance(spec.verifier, PrmVerifier) and spec.verifier.model is None:
        return Fault(
            f"model {spec.model!r} has no process reward model by default: name a served 'model', or another 'kind'",
            "verifier",
            "no-verifier",
        )
    is_open = merged.origins.get("verifier") == MODEL_VERIFIER and merged.origins["strategy"] == REQUEST
    if is_open and spec.verifier is None and _check_strategy(spec) is None and _find_use(spec).needs_scores:
        return Fault(
            f"strategy {name!r} needs a verifier, and model {spec.model!r} has none by default: give the job a "
            f"'verifier', such as a rule or a judge, or use {FALLBACK_STRATEGY}; the operator may set REASONER_PRM, or "
            f"'verifier' in [models.{spec.model}]",
            "strategy",
            "no-verifier",
        )
    return None


def _find_use(spec: JobSpec) -> VerifierUse:
    """Return what the strategy asks of the verifier."""
    name = spec.strategy.name
    return STRATEGIES[name].verifier_use(parse_params(name, spec.strategy.params))


def _check_verifier(spec: JobSpec) -> Fault | None:
    """Check that the job has a verifier that does what its strategy asks of it."""
    name, verifier, use = spec.strategy.name, spec.verifier, _find_use(spec)
    message = None
    if verifier is None and use.needs_scores:
        message = f"strategy {name!r} needs a verifier, but 'verifier' is null: name one, or use {FALLBACK_STRATEGY}"
    elif use is VerifierUse.COMPARISONS and not (verifier is not None and verifier.compares):
        suitable = ", ".join(kind for kind, model in verifier_kinds().items() if model.compares)
        given = "null" if verifier is None else repr(verifier.kind)
        message = (
            f"strategy {name!r} needs a verifier that compares two solutions, and 'verifier' is {given}: leave it out, "
            f"so that the job's own model compares, or use one of {suitable}"
        )
    elif verifier is not None and not verifier.can_score() and use is not VerifierUse.COMPARISONS:
        able = ", ".join(name for name, other in STRATEGIES.items() if other.verifier is VerifierUse.COMPARISONS)
        message = (
            f"verifier {verifier.kind!r} compares two solutions, and strategy {name!r} needs scores of single ones or "
            f"none: use one of {able}, or another kind of verifier"
        )
    elif verifier is not None and use is VerifierUse.STEP_SCORES and not verifier.scores_steps:
        suitable = ", ".join(kind for kind, model in verifier_kinds().items() if model.scores_steps)
        message = (
            f"strategy {name!r} needs a verifier of single steps, and {verifier.kind!r} scores finished solutions "
            f"alone: use one of {suitable}"
        )
    elif spec.models is not None and isinstance(verifier, ProbeVerifier):
        problem = "a probe reads the states of one policy: give 'model', or another verifier"
        return Fault(problem, "models", about=["verifier"])
    return None if message is None else Fault(message, about=["strategy", "verifier"])


_FEATURES: Mapping[Feature, tuple[str | None, str]] = {
    Feature.SEVERAL_MODELS: ("models", "searches with one model: give 'model'"),
    Feature.CONSTRAINT: ("constraint", "adds text or writes no solutions, which no constraint can hold: leave it out"),
    Feature.EARLY_STOP: (None, "cannot stop by 'confidence': leave it out"),
}
"""The field of a job that asks for each feature of strategies, and what a strategy without it does."""


def _check_features(spec: JobSpec) -> Fault | None:
    """Check that the strategy supports all that the job asks for beyond a question."""
    asked = {
        Feature.SEVERAL_MODELS: spec.models is not None,
        Feature.CONSTRAINT: spec.constraint is not None,
        Feature.EARLY_STOP: spec.confidence is not None,
    }
    supported = STRATEGIES[spec.strategy.name].supports
    missing = next((feature for feature, is_asked in asked.items() if is_asked and feature not in supported), None)
    if missing is None:
        return None
    able = ", ".join(name for name, strategy in STRATEGIES.items() if missing in strategy.supports)
    field, problem = _FEATURES[missing]
    return Fault(f"strategy {spec.strategy.name!r} {problem}, or use one of {able}", field, about=["strategy"])


def _check_members(spec: JobSpec) -> Fault | None:
    """Check that the models that the strategy's parameters name are those of the job."""
    for name, model in parse_params(spec.strategy.name, spec.strategy.params).members.items():
        if model not in spec.policy_names:
            own = ", ".join(spec.policy_names) or "the service's own"
            return Fault(f"{model!r} is none of the job's models: name one of {own}", f"strategy.{name}")
    return None


def _check_python(spec: JobSpec) -> Fault | None:
    """Check that solutions can hold calls of Python and their output."""
    if spec.python is None:
        return None
    extract, verifier = spec.answer.extract, spec.verifier
    reads_code = extract == "code" or (extract == "auto" and spec.answer.compare == "code")
    if isinstance(extract, CodeExtract):
        reads_code = extract.code in PYTHON_NAMES
    if Feature.CANDIDATES in STRATEGIES[spec.strategy.name].supports:
        return Fault(f"strategy {spec.strategy.name!r} writes no solutions, so that nothing calls a tool", "tools")
    if spec.constraint is not None:
        return Fault("no constraint can hold the output of a tool: leave out 'constraint' or 'tools'", "tools")
    if reads_code:
        has_tests = verifier is not None and verifier.answer_language == "python"
        reader = f"verifier {verifier.kind!r}" if verifier and has_tests else "the job"
        return Fault(
            f"{reader} reads a block of code as the answer, and a block of Python is a call: leave 'tools' out, or "
            "give 'answer' an 'extract' that names another language or a pattern",
            "tools",
            about=["verifier"] if has_tests else ["answer"],
        )
    if stop := next((stop for stop in spec.stop if stop in "\n```python\n"), None):
        problem = f"the stop string {stop!r} ends a solution in the middle of a call: leave it out"
        return Fault(problem, "tools", about=["stop"])
    return None


def _check_thinking(spec: JobSpec) -> Fault | None:
    """Check the limit that the budget states, although a lower one of the sampling may hold, and the one that holds."""
    limits, budget = (spec.budget.thinking_tokens, spec.thinking_tokens), spec.budget.tokens
    limit = next((limit for limit in limits if limit is not None and budget is not None and limit > budget), None)
    if limit is None:
        return None
    return Fault(
        f"a thought of {limit} tokens does not fit into the job's {budget} tokens: give at most {budget}, fewer "
        "to leave some for the answer",
        "budget.thinking_tokens",
        "impossible-budget",
    )


_RULES: Sequence[Callable[[JobSpec], Fault | None]] = (
    _check_last_message,
    _check_strategy,
    _check_candidates,
    _check_verifier,
    _check_features,
    _check_members,
    _check_python,
    _check_thinking,
)
"""The rules on the fields of a job. Those behind the one on the strategy's parameters rely on it."""


def _check_models(merged: Merged, models: Sequence[ModelInfo] | None) -> None:
    """Raise ``JobRefused`` for a model that is not served, or whose server cannot do what the job needs.

    A process reward model that the operator names may be away for a while, of which the client knows nothing.
    """
    if models is None:
        return
    spec, origins = merged.spec, merged.origins
    selectors = [selector for selector, _ in policy_selectors(spec)]
    is_operators = origins.get("verifier.model", origins["verifier"]) == MODEL_VERIFIER
    verifier = verifier_selector(spec.verifier)
    if verifier is not None and not (is_operators and isinstance(spec.verifier, PrmVerifier)):
        selectors.append(verifier)
    for selector in selectors:
        if selector.name is not None:
            try:
                selector.find(models)
            except InvalidRequest as error:
                raise JobRefused("unknown-model", selector.field, str(error)) from None
    for policy in models:
        if policy.id in spec.policy_names and (refusal := find_refusal(spec, policy)) is not None:
            raise refusal


def _check_tool_formats(spec: JobSpec, policies: Sequence[ModelInfo]) -> None:
    """Raise ``JobRefused`` for calls whose format is not known or does not run on a model's server.

    A schema to which demanded calls cannot be held is named with its path.
    """
    try:
        if spec.functions:
            find_model_format(spec, policies[0])
        resolve_python(spec, policies)
        forced = list_forced(spec)
        if not can_force(spec, policies, STRATEGIES[spec.strategy.name].constraint_needs):
            return
    except InvalidRequest as error:
        raise JobRefused("unsupported-tool", error.field, str(error)) from None
    for index, tool in enumerate(spec.tools):
        if isinstance(tool, FunctionTool) and tool in forced:
            check_schema(make_schema(tool), f"tools.{index}.parameters")
