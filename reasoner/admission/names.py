"""Names that an operator gives to a way of searching. A client says one where it would name a model.

``MODEL:EFFORT`` is such a name without being configured, unless that very word is a served model. A name may stand for
another one, whose fields it changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from reasoner.admission.defaults import ModelDefaults, parse_verifier_name
from reasoner.admission.effort import DefaultStrategy, Effort, find_contradiction
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import StrictModel
from reasoner.budget.spec import Budget
from reasoner.jobs.messages import Text
from reasoner.jobs.request import JobRequest, read_part
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.spec import Policies, PolicySpec, PromptTemplate, StopStrings, StrategySpec, TemplateKwargs
from reasoner.jobs.verifier_specs import Verifier

OFFERED_EFFORTS: Final = ("low", "medium", "high")
"""Efforts with which each model is listed; any other effort may follow a model's name, too."""
Fixable = Literal[
    "strategy",
    "verifier",
    "budget",
    "sampling",
    "system",
    "prompt",
    "stop",
    "chat_template_kwargs",
    "answer",
    "confidence",
]


class NameFault(ValueError):
    """A name stands for itself, or contradicts itself."""


class Name(StrictModel):
    """The fields that a name gives to jobs. A request's own take precedence, unless the name fixes them."""

    description: str | None = Field(None, max_length=512, description="For people, in lists of models.")
    model: str | None = Field(None, min_length=1, description="A served model, or another name.")
    models: Policies | None = Field(None, description="Several models that write solutions, as in a job.")
    strategy: DefaultStrategy | None = Field(None, description="A name, or a name with parameters.")
    verifier: Annotated[Verifier | None, BeforeValidator(parse_verifier_name)] = Field(
        None, description="The name of a served process reward model, a table as in a job, or none."
    )
    effort: str | None = Field(None, description="An effort, whose limits and strategy hold.")
    budget: Budget = Field(default_factory=Budget, description="Limits of a job that has none of its own.")
    sampling: Sampling = Field(default_factory=Sampling)
    system: Text | None = Field(None, description="The system message of conversations without one.")
    prompt: PromptTemplate | None = Field(None, description="The template of questions, as in a job.")
    stop: StopStrings = Field(default_factory=list)
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    answer: AnswerSpec | None = Field(None, description="How answers are found and compared, as in a job.")
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    fixed: tuple[Fixable, ...] = Field(
        (),
        description="Fields that a request may not change: another value is refused, and of two budgets the lower "
        f"limits hold. Of {', '.join(get_args(Fixable))}.",
    )

    @model_validator(mode="after")
    def _check_one_target(self) -> Self:
        if (self.model is None) == (self.models is None):
            raise ValueError("give either 'model', what the name stands for, or 'models', several models")
        if self.effort is not None and self.budget.effort not in (None, self.effort):
            raise ValueError("give either 'effort' or 'effort' in 'budget', not both")
        return self

    @property
    def own_effort(self) -> str | None:
        """The effort that the name gives."""
        return self.effort or self.budget.effort


@dataclass(frozen=True, slots=True)
class NamedFields:
    """The fields that a name gives to its jobs, those of the names behind it included."""

    name: str
    fields: Mapping[str, Any]
    """Fields of a job by name, as ``JobRequest.list_given`` returns them; ``model`` is the served one."""
    effort_strategy: StrategySpec | None
    """The strategy of the name's effort, where the name gives none itself."""
    fixed: frozenset[str]
    caps: Mapping[str, float]
    """The limits that hold beside those of a request."""

    @property
    def targets(self) -> list[str]:
        """The models for which the name stands."""
        return [entry.model for entry in self.fields.get("models", ())] or [self.fields["model"]]

    def find_change(self, request: JobRequest) -> str | None:
        """Return the field of the request that differs from one that the name fixes; ``None`` if there is none."""
        given = request.list_given()
        if "system" in self.fixed and request.has_system_message:
            return "messages"
        for field in sorted(self.fixed - {"budget"}):
            own, other = self.fields.get(field), given.get(field)
            if field not in given or (field == "strategy" and request.candidates is not None):
                continue  # candidates are ranked, and no strategy writes any
            if isinstance(own, dict) and isinstance(other, dict):
                changed = next((part for part, value in other.items() if own.get(part, value) != value), None)
                if changed is not None:
                    return f"{field}.{changed}"
            elif own != other:
                return field
        return None


class NameService(Protocol):
    """The part of a service's configuration that names are resolved with."""

    @property
    def names(self) -> Mapping[str, Name]: ...
    @property
    def effort(self) -> Mapping[str, Effort]: ...
    @property
    def models(self) -> Mapping[str, ModelDefaults]: ...
    @property
    def model_name(self) -> str: ...
    def remote_models(self) -> Mapping[str, str]:
        """Return the models that servers are known to have, each with the server's name."""
        ...


def find_name(word: str | None, service: NameService, served: Collection[str]) -> NamedFields | None:
    """Return what a word stands for that a client gave as the model; ``None`` for a model itself.

    ``served`` are the models that are known to be served. Raises ``NameFault`` for a name that stands for itself.
    """
    chain: list[tuple[str, Name]] = []
    while word is not None and (name := _find_entry(word, service, served)) is not None:
        if any(word == known for known, _ in chain):
            path = " -> ".join([*(known for known, _ in chain), word])
            raise NameFault(f"{chain[0][0]!r} stands for itself ({path}): give it a served model")
        chain.append((word, name))
        word = name.model
    return _merge_chain(chain, word, service, served) if chain else None


def find_model(word: str, service: NameService, served: Collection[str]) -> str:
    """Return the model that a word means where only a model can stand. Raises ``NameFault`` for another name.

    ``served``: as for ``find_name``.
    """
    name = find_name(word, service, served) if word in service.names else None
    if name is None:
        return word
    if name.fields.keys() - {"model"} or name.fixed:
        raise NameFault(f"{word!r} stands for a search, not for a model alone: give a model")
    return str(name.fields["model"])


def _find_entry(word: str, service: NameService, served: Collection[str]) -> Name | None:
    if word in service.names:
        return service.names[word]
    model, _, effort = word.rpartition(":")
    configured = (service.model_name, *service.models, *service.remote_models())
    is_model = word in served or word in configured
    return Name(model=model, effort=effort) if model and effort in service.effort and not is_model else None


def _merge_chain(
    chain: list[tuple[str, Name]], model: str | None, service: NameService, served: Collection[str]
) -> NamedFields:
    """Return the fields of names of which each stands for the next, and the last one for ``model``, or for several."""
    fields: dict[str, Any] = {}
    caps: dict[str, float] = {}
    effort_strategy, is_bounded = None, False
    for word, name in chain:
        own = _list_fields(word, name, service.effort)
        if "budget" in name.fixed:
            limits = own.get("budget", {})
            caps = limits | caps | {limit: min(caps[limit], limits[limit]) for limit in caps.keys() & limits.keys()}
        for field, value in own.items():
            present = fields.get(field)
            if field == "budget" and is_bounded:
                continue
            if isinstance(value, dict):
                fields[field] = value | (present or {})
            else:
                fields.setdefault(field, value)
        if name.own_effort is not None:
            strategy = service.effort[name.own_effort].strategy
            if strategy is not None and "strategy" in name.fixed:
                fields.setdefault("strategy", strategy)
            if not is_bounded:
                effort_strategy, is_bounded = strategy, True
    if "models" in fields:
        fields["models"] = replace_aliases(fields["models"], service, served)
        model = fields["models"][0].model
    fields["model"] = model
    fixed = frozenset[str](field for _, name in chain for field in name.fixed)
    effort_strategy = None if "strategy" in fields else effort_strategy
    return NamedFields(chain[0][0], fields, effort_strategy, fixed=fixed, caps=caps)


def replace_aliases(models: Sequence[PolicySpec], service: NameService, served: Collection[str]) -> list[PolicySpec]:
    """Return a job's several models with those for which aliases stand. Raises ``NameFault`` for one named twice."""
    found = [entry.model_copy(update={"model": find_model(entry.model, service, served)}) for entry in models]
    words = [entry.model for entry in found]
    twice = next((word for word in words if words.count(word) > 1), None)
    if twice is not None:
        raise NameFault(f"{twice!r} is named twice among the models: name each model once, with its weight")
    return found


def _list_fields(word: str, name: Name, efforts: Mapping[str, Effort]) -> dict[str, Any]:
    """Return the fields of a job that one name gives, with the limits of its effort. Raises ``NameFault``."""
    given = name.list_given()
    fields = {field: read_part(value) for field, value in given.items() if field not in _NOT_OF_JOBS}
    budget = name.budget.model_copy(update={"effort": name.own_effort})
    if (contradiction := find_contradiction(budget, efforts)) is not None:
        raise NameFault(f"{word!r}: {contradiction}")
    limits = budget.model_dump(exclude_none=True, exclude={"effort"})
    if name.own_effort is not None:
        limits = efforts[name.own_effort].budget.model_dump(exclude_none=True) | limits
    return {field: value for field, value in fields.items() if field != "budget"} | (
        {"budget": limits} if limits else {}
    )


_NOT_OF_JOBS = ("description", "fixed", "effort", "model")
