"""The sources of a job's fields, in the order in which they are asked: the first that has a field decides it.

Parts that are mappings, such as ``sampling``, are merged field by field. A source names all fields that it may set, and
the reference of defaults is written from this table.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.protocol.types import ModelInfo
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.effort import Effort
from reasoner.admission.names import Name, NamedFields, find_name, replace_aliases
from reasoner.answers.instruction import find_instruction
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import VerifierSpec
from reasoner.budget.prices import Prices
from reasoner.budget.spec import Budget
from reasoner.jobs.request import JobRequest
from reasoner.jobs.sampling_spec import NEUTRAL, Sampling
from reasoner.jobs.spec import (
    DEFAULT_STRATEGY,
    FALLBACK_STRATEGY,
    PLACEHOLDER,
    SELECTING_STRATEGY,
    JobSpec,
    StrategySpec,
)
from reasoner.jobs.verifier_specs import PairwiseVerifier, PrmVerifier
from reasoner.strategies.base import DecidedBy
from reasoner.strategies.registry import STRATEGIES

Fields = dict[str, Any]
"""The fields of a job that are set so far. The partial parts are mappings, a process reward model among them."""


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
    def names(self) -> Mapping[str, Name]: ...
    def remote_models(self) -> Mapping[str, str]:
        """Return the models that servers are known to have, each with the server's name."""
        ...

    @property
    def prices(self) -> Mapping[str, Prices]: ...
    @property
    def price_sources(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Submission:
    """A request, and the defaults that hold for its model."""

    request: JobRequest
    model: str | None
    """The name of the job's first model; ``None`` for the only one of an engine."""
    profile: ModelDefaults
    verifier: VerifierSpec | None
    """The verifier of jobs of this model that name none."""
    efforts: Mapping[str, Effort]
    budget: Mapping[str, Any]
    """The limits of jobs that have none."""
    served: ModelInfo | None = None
    """The model as its engine describes it; ``None`` as long as none answers."""
    is_in_batch: bool = False
    """True if the job shares a budget, so that its own is a cap and has no defaults."""
    name: NamedFields | None = None
    """The name that the request gave as its model, with its fields, if it is one."""

    @classmethod
    def to_service(
        cls,
        request: JobRequest,
        service: ServiceDefaults,
        models: Iterable[ModelInfo] = (),
        *,
        in_batch: bool = False,
    ) -> Submission:
        """Create for a job that a service runs; ``models`` are those that are known to be served.

        Raises ``NameFault`` for a name that stands for itself.
        """
        models = list(models)
        ids = [info.id for info in models]
        if request.models is not None:
            request = request.model_copy(update={"models": replace_aliases(request.models, service, ids)})
        name = find_name(request.model, service, ids)
        model = _name_model(request) if name is None else name.fields["model"]
        model = model or service.model_name
        profile, verifier = service.models.get(model, ModelDefaults()), service.default_verifier(model)
        budget = {"tokens": service.budget_tokens, "seconds": service.budget_seconds}
        served = next((info for info in models if info.id == model), None)
        return cls(request, model, profile, verifier, service.effort, budget, served, in_batch, name)

    @classmethod
    def to_program(cls, request: JobRequest, models: Mapping[str, ModelDefaults]) -> Submission:
        """Create for a job that runs outside of a service.

        It has all defaults of its model but the budget, the strategy and the verifier, which are the program's.
        """
        model = _name_model(request)
        profile = models.get(model or "", ModelDefaults())
        profile = profile.model_copy(update={"budget": Budget(), "strategy": None})
        return cls(request, model, profile, PrmVerifier(), {}, {})


def _name_model(request: JobRequest) -> str | None:
    return request.models[0].model if request.models else request.model


@dataclass(frozen=True, slots=True)
class Source:
    """One of the places from which a job gets fields."""

    name: str
    sets: Sequence[str]
    """The fields that it may set."""
    description: str
    read: Callable[[Fields, Submission], Mapping[str, Any]]
    """Returns the fields that it has for a job, of which those are known that the sources before it have set."""
    lowers: Sequence[str] = ()
    """Limits of its budget that hold beside those of the sources before it: the lowest holds."""
    replaces_null: bool = False
    """True if it also sets what a source before it has left null."""


def _read_request(_: Fields, submission: Submission) -> Fields:
    given = submission.request.list_given()
    if submission.name is not None:
        del given["model"]
    return given


def _read_implied(_: Fields, submission: Submission) -> Fields:
    request, implied = submission.request, Fields()
    if request.models:
        implied["model"] = submission.model
    if request.candidates is not None:
        implied["strategy"] = StrategySpec(name=SELECTING_STRATEGY)
    return implied


def _read_name(fields: Fields, submission: Submission) -> Fields:
    """Return the name's fields. An effort of the request replaces the name's limits, and the strategy of its effort."""
    name, request = submission.name, submission.request
    if name is None:
        return {}
    given = dict(name.fields) | {"name": name.name}
    has_effort = "effort" in fields.get("budget", {})
    if has_effort:
        given.pop("budget", None)
    elif name.effort_strategy is not None:
        given["strategy"] = _fit_strategy(name.effort_strategy, given | fields, submission)
    if "strategy" in given and "strategy" in name.fixed:
        given["strategy"] = _fit_strategy(given["strategy"], given | fields, submission)
    if request.has_system_message:
        given.pop("system", None)
    if request.candidates is not None:  # which are ranked: nothing is written
        given.pop("models", None)
    return given


def _read_effort(fields: Fields, submission: Submission) -> Fields:
    effort = submission.efforts.get(fields.get("budget", {}).get("effort", ""))
    if effort is None:
        return {}
    limits = {"budget": effort.budget.model_dump(exclude_none=True)}
    return limits | ({"strategy": _fit_strategy(effort.strategy, fields, submission)} if effort.strategy else {})


def _fit_strategy(strategy: StrategySpec, fields: Fields, submission: Submission) -> StrategySpec:
    """Return an effort's strategy, or a vote with as many samples if it needs a verifier and the job has none."""
    has_verifier = _choose_verifier(fields | {"strategy": strategy}, submission) is not None
    if has_verifier or not STRATEGIES[strategy.name].needs_verifier:
        return strategy
    samples = {"n": strategy.params["n"]} if "n" in strategy.params else {}
    return StrategySpec.model_validate({"name": FALLBACK_STRATEGY, **samples})


def _read_verifier(fields: Fields, submission: Submission) -> Fields:
    default = submission.verifier
    if "verifier" not in fields:
        has_chosen = _choose_verifier(fields, submission) is default
        return {"verifier": default} if has_chosen else {}
    is_open_prm = isinstance(fields["verifier"], dict) and "model" not in fields["verifier"]
    return {"verifier": default.model_dump()} if is_open_prm and isinstance(default, PrmVerifier) else {}


def _choose_verifier(fields: Fields, submission: Submission) -> Any:
    """Return the job's verifier, by the default or the job's own model if it leaves the choice open."""
    if "verifier" in fields:
        return fields["verifier"]
    default, strategy = submission.verifier, _find_strategy(fields, submission)
    if strategy is not None and strategy.compares and not (default is not None and default.compares):
        return PairwiseVerifier()
    return default


def _find_strategy(fields: Fields, submission: Submission) -> StrategySpec | None:
    """Return the strategy that is set, or that the sources which follow will set; ``None`` for the last of them."""
    chosen: StrategySpec | None = fields.get("strategy") or submission.profile.strategy
    effort = submission.efforts.get(_list_model_limits(fields, submission).get("effort", ""))
    return effort.strategy if chosen is None and effort is not None else chosen


def _read_answer_rule(fields: Fields, submission: Submission) -> Fields:
    if fields.get("answer", {}).keys() & {"compare", "extract"}:
        return {}
    verifier, constraint = _choose_verifier(fields, submission), submission.request.constraint
    language = verifier.answer_language if isinstance(verifier, VerifierSpec) else None
    if language is not None:
        return {"answer": {"compare": "code", "extract": {"code": language}}}
    if constraint is not None:
        return {"answer": {"compare": "json" if constraint.is_json else "code", "extract": "all"}}
    return {}


def _read_model(fields: Fields, submission: Submission) -> Fields:
    profile = submission.profile
    given = {name: value for name, value in profile.list_given().items() if name in _MODEL_FIELDS and value is not None}
    if submission.request.has_system_message:
        given.pop("system", None)
    sampling = profile.sampling.model_dump(exclude_none=True)
    if profile.max_tokens is not None:
        sampling["max_tokens"] = profile.max_tokens
    tokens = fields.get("budget", {}).get("tokens")
    if tokens is not None and "thinking_tokens" in sampling:  # a smaller budget needs no other limit of the client's
        sampling["thinking_tokens"] = min(sampling["thinking_tokens"], tokens)
    if profile.answer is not None:
        given["answer"] = profile.answer.list_given()
    return given | {"sampling": sampling, "budget": _list_model_limits(fields, submission)}


def _list_model_limits(fields: Fields, submission: Submission) -> Fields:
    """Return the model's limits, which are those of jobs that have none; one of single thoughts does not end a job."""
    if submission.is_in_batch or _has_limit(fields):
        return {}
    return submission.profile.budget.model_dump(exclude_none=True)


def _has_limit(fields: Fields) -> bool:
    return bool(fields.get("budget", {}).keys() - {"thinking_tokens"})


def _read_served(fields: Fields, submission: Submission) -> Fields:
    if submission.served is None or "models" in fields:  # several models have their own parameters each
        return {}
    own = {name: value for name, value in submission.served.sampling.items() if name in Sampling.model_fields}
    return {"sampling": NEUTRAL | own}


def _read_service(fields: Fields, submission: Submission) -> Fields:
    if submission.is_in_batch:
        return {"model": submission.model, "priority": "batch"}
    return {"model": submission.model, "budget": {} if _has_limit(fields) else submission.budget}


def _read_fallback(fields: Fields, submission: Submission) -> Fields:
    verifier = _choose_verifier(fields, submission)
    strategy = StrategySpec(name=FALLBACK_STRATEGY if verifier is None else DEFAULT_STRATEGY)
    seed = secrets.randbelow(2**53)  # exact as a JavaScript number
    open_parts: Fields = {"budget": {}, "sampling": {}, "answer": {}}
    return {"strategy": strategy, "verifier": verifier, "seed": seed, **open_parts}


def _read_instruction(fields: Fields, submission: Submission) -> Fields:
    """Return a prompt that asks for the answer where it is compared, so that a conversation is left as it is."""
    request, verifier = submission.request, fields["verifier"]
    strategy = STRATEGIES.get(fields["strategy"].name)
    votes = strategy is not None and strategy.decided_by is DecidedBy.VOTE
    is_fact = isinstance(verifier, VerifierSpec) and verifier.is_conclusive
    is_compared = bool(fields["answer"]) or votes or is_fact
    has_prompt = fields.get("system") is not None or fields.get("prompt") is not None or request.has_system_message
    if not is_compared or has_prompt or request.conversation[-1]["role"] != "user":
        return {}
    instruction = find_instruction(AnswerSpec.model_validate(fields["answer"]))
    return {} if instruction is None else {"prompt": f"{PLACEHOLDER}\n\n{instruction}"}


_MODEL_FIELDS = (
    *("system", "prompt", "stop", "chat_template_kwargs", "steps", "thoughts", "tool_format"),
    *("sampling", "answer", "budget", "strategy", "record_logprobs"),
)
REQUEST, NAME, EFFORT, MODEL_EFFORT = "request", "name", "effort", "model's effort"
MODEL, MODEL_VERIFIER = "model", "model's verifier"
SOURCES: Sequence[Source] = (
    Source(REQUEST, tuple(JobRequest.model_fields), "What the client says.", _read_request),
    Source(
        "models and candidates",
        ("model", "strategy"),
        "What follows from these fields of the request: the first of several models, and the strategy "
        f"`{SELECTING_STRATEGY}` for candidates.",
        _read_implied,
    ),
    Source(
        NAME,
        (*(field for field in Name.model_fields if field in JobSpec.model_fields), "name"),
        "What the request's `model` stands for, if it is a name: `[names.NAME]`, or `MODEL:EFFORT`. Its limits are "
        "left out if the request names an effort; of a budget that the name fixes the lower limits hold.",
        _read_name,
    ),
    Source(
        EFFORT,
        ("budget", "strategy"),
        "The effort that `budget.effort` names: its limits, of which `thinking_tokens` only lowers a limit of the "
        "request, and its strategy, which becomes a vote with as many samples if it needs a verifier and there is "
        "none.",
        _read_effort,
        lowers=("thinking_tokens",),
    ),
    Source(
        MODEL_VERIFIER,
        ("verifier",),
        "The verifier of the model's settings, else the service's. It is left out for a strategy that compares "
        "solutions, unless it does so.",
        _read_verifier,
    ),
    Source(
        "verifier and constraint",
        ("answer",),
        "The way in which a verifier of code or JSON, or else a constraint, reads the answer; unless the request says "
        "how answers are compared or extracted.",
        _read_answer_rule,
    ),
    Source(
        MODEL,
        _MODEL_FIELDS,
        "The settings of the model, `[models.NAME]` and its `reasoner-model.toml`. Its budget is for jobs without a "
        "limit outside of batches, its system message for conversations without one.",
        _read_model,
    ),
    Source(
        MODEL_EFFORT,
        ("budget", "strategy"),
        "The effort that the model's budget names.",
        _read_effort,
        lowers=("thinking_tokens",),
    ),
    Source(
        "served model",
        ("sampling",),
        "The parameters that are published with the model (`generation_config.json`, `general.sampling`), else those "
        "that change nothing: temperature 1, no filter, no penalty. Each of several `models` keeps its own.",
        _read_served,
        replaces_null=True,
    ),
    Source(
        "service",
        ("model", "budget", "priority"),
        "The service's model, and its limits for jobs without one outside of batches; in batches the priority.",
        _read_service,
    ),
    Source(
        "fallback",
        ("strategy", "verifier", "seed", "budget", "sampling", "answer"),
        f"The strategy `{DEFAULT_STRATEGY}`, or `{FALLBACK_STRATEGY}` without a verifier; the job's own model as the "
        "verifier of a strategy that compares; a seed that is drawn. Other fields have the default of the schema.",
        _read_fallback,
    ),
    Source(
        "instruction",
        ("prompt",),
        "The question with an instruction for the answer (`answer.instruct`), where answers are compared and there is "
        "neither a system message nor a prompt.",
        _read_instruction,
        replaces_null=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Merged:
    """A job, and the sources of its fields."""

    spec: JobSpec
    origins: Mapping[str, str]
    """Names of sources by field, and by ``part.field`` where a part is merged; the part's own is the first of them."""


def merge_sources(submission: Submission, sources: Sequence[Source] = SOURCES) -> Merged:
    """Return the job of a request, with the fields that it leaves open from the sources after it."""
    fields, origins = Fields(), dict[str, str]()
    for source in sources:
        for name, value in source.read(fields, submission).items():
            present = fields.get(name)
            if isinstance(present, dict) and isinstance(value, Mapping):
                shared = present.keys() & value.keys() & set(source.lowers)
                kept = {part: own for part, own in present.items() if own is not None or not source.replaces_null}
                fields[name] = {**value, **kept, **{limit: min(present[limit], value[limit]) for limit in shared}}
            elif name not in fields or (present is None and source.replaces_null):
                fields[name] = value
            if value != {}:
                origins.setdefault(name, source.name)
            for part in value if isinstance(value, Mapping) else ():
                origins.setdefault(f"{name}.{part}", source.name)
    _cap_budget(fields, origins, submission)
    return Merged(JobSpec.model_validate(fields), origins)


def _cap_budget(fields: Fields, origins: dict[str, str], submission: Submission) -> None:
    """Lower the limits to those of a name that fixes its budget; an effort with a higher one is replaced by its limits.

    An effort that is not known stays, and is refused.
    """
    caps: Mapping[str, float] = {} if submission.name is None else submission.name.caps
    budget: Fields = fields["budget"]
    effort = budget.get("effort")
    if effort is not None and effort not in submission.efforts:
        return
    lowered = {limit: cap for limit, cap in caps.items() if budget.get(limit) is None or budget[limit] > cap}
    if lowered:
        fields["budget"] = {part: value for part, value in budget.items() if part != "effort"} | lowered
        origins |= {f"budget.{limit}": NAME for limit in lowered}
