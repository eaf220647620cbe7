"""The verifiers that a job can ask for: one model per kind, discriminated by ``kind``.

To add a kind, add its model here and its scorer in ``reasoner.verifiers``, or declare it in another package. No kind
takes an address: the service's configuration alone decides which servers are contacted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema

from prm.scorers.grades import MAX_REPEATS
from prm.scorers.templates import TemplateRefused
from prm.scorers.verdict_formats import (
    MAX_LABELS,
    SCALES,
    FormatName,
    Scale,
    open_check_format,
    parse_check_template,
    parse_compare_template,
)
from reasoner.base_model import StrictModel, VerifierSpec
from reasoner.jobs.messages import MAX_PROBLEM_CHARS
from reasoner.jobs.rule_specs import RULES, RuleSpec
from reasoner.plugins import OWN_PACKAGE, VERIFIERS_GROUP, Plugin, PluginError, explain_unusable, load_plugins
from reasoner.tree import Reads

Aggregation = Literal["last", "min", "prod", "mean", "max"]
ReadParts = Annotated[
    Reads, Field(description="Parts of a thinking model's solution that it reads; most were trained on answers.")
]


class PrmVerifier(VerifierSpec):
    """A process reward model scores every step; ``aggregation`` makes one number of a solution's steps."""

    kind: Literal["prm"] = "prm"
    scores_steps: ClassVar[bool] = True
    model: str | None = Field(None, description="Name of a served verifier; without it the service's own.")
    aggregation: Aggregation = "last"
    reads: ReadParts = "answer"


class LanguageModelVerifier(VerifierSpec):
    """Base of verifiers that are language models, by default the one that writes the solutions."""

    model: str | None = Field(None, description="Name of a served language model; without it the job's own.")


class JudgeVerifier(LanguageModelVerifier):
    """A language model is asked whether the solution is right so far; the score is its probability of "Yes"."""

    kind: Literal["judge"] = "judge"
    scores_steps: ClassVar[bool] = True
    aggregation: Aggregation = "last"
    reads: ReadParts = "answer"


class Criterion(StrictModel):
    """One point of a rubric, which is judged by itself."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    description: Annotated[str, Field(min_length=1, max_length=2000)] | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0

    @property
    def text(self) -> str:
        return self.name if self.description is None else f"{self.name}: {self.description}"


def _check_names(rubric: list[Criterion]) -> list[Criterion]:
    names = [criterion.name for criterion in rubric]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"criterion {twice!r} is named twice")
    return rubric


Rubric = Annotated[list[Criterion], Field(max_length=16), AfterValidator(_check_names)]
Template = Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)]


class WrittenVerifier(LanguageModelVerifier):
    """Fields of verifiers whose model writes a critique before its verdict."""

    template: Template | None = Field(None, description="Prompt as a Jinja template; without it the model's own.")
    verdict: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="Text after which a label is due; it ends a critique, and is appended to it."
    )
    votes: Annotated[int, Field(ge=1, le=64, description="Critiques whose verdicts are averaged.")] = 1
    max_tokens: Annotated[int, Field(ge=0, le=32_768)] | None = Field(
        None,
        description="Longest critique; 0 reads the verdict without one. By default 512, or a quarter of the context if "
        "that is less.",
    )
    temperature: Annotated[float, Field(ge=0, le=10)] | None = Field(
        None, description="Sampling temperature of critiques; without it the model's own, else 1."
    )
    rubric: Rubric = Field(default_factory=list, description="Criteria that are judged one by one, with weights.")

    @model_validator(mode="after")
    def _check_votes_differ(self) -> Self:
        if self.votes > 1 and (self.max_tokens == 0 or self.temperature == 0):
            raise ValueError(
                f"{self.votes} votes would all be the same without sampled critiques: give 'max_tokens' and "
                "'temperature' above 0, or one vote"
            )
        return self


class GenerativeVerifier(WrittenVerifier):
    """A language model writes a critique of the solution, then a verdict; its expected value is the score."""

    kind: Literal["generative"] = "generative"
    scores_steps: ClassVar[bool] = True
    format: FormatName | None = Field(
        None, description="Published format that the model was trained on; without it the model's own, else plain."
    )
    labels: Scale | dict[str, Annotated[float, Field(ge=0, le=1)]] | None = Field(
        None, description="Labels of a verdict with their scores, or the name of a scale; by default the format's."
    )
    by_step: bool = Field(False, description="Judge each step by itself, instead of the solution so far as a whole.")
    aggregation: Aggregation = "last"
    reads: ReadParts = "answer"

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        source = self.template
        if source is None and self.format is not None:
            source = open_check_format(self.format, None).template
        if source is not None:
            _raise_value_error(lambda: parse_check_template(source, has_criteria=bool(self.rubric)))
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if isinstance(self.labels, dict) and not 2 <= len(self.labels) <= MAX_LABELS:
            raise ValueError(f"'labels' needs 2 to {MAX_LABELS} labels, each with its score")
        return self

    @property
    def label_scores(self) -> dict[str, float] | None:
        """Labels with their scores, if the job gives them."""
        return dict(SCALES[self.labels]) if isinstance(self.labels, str) else self.labels


class PairwiseVerifier(WrittenVerifier):
    """A language model decides which of two solutions is better, in both orders. For strategies that compare."""

    kind: Literal["pairwise"] = "pairwise"
    compares: ClassVar[bool] = True
    reads: ReadParts = "answer"

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        source = self.template
        if source is not None:
            _raise_value_error(lambda: parse_compare_template(source, has_criteria=bool(self.rubric)))
        return self


def _raise_value_error(parse: Callable[[], object]) -> None:
    """Call ``parse`` and name the field in the error of a refused template."""
    try:
        parse()
    except TemplateRefused as error:
        raise ValueError(f"template: {error}") from None


class GradedVerifier(LanguageModelVerifier):
    """A language model grades; the score is the expectation over its grades, read where one is due. It writes nothing.

    The job's own model is asked in place, as a continuation of the branch that it wrote: only the question is computed.
    """

    kind: Literal["graded"] = "graded"
    scores_steps: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    also_scores: ClassVar[bool] = True
    is_billed_by_solution: ClassVar[bool] = True
    grades: Scale | dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        "A-T", description="Grades with their scores, or the name of a scale."
    )
    criteria: Rubric = Field(default_factory=list, description="Criteria that are graded one by one, with weights.")
    repeats: Annotated[int, Field(ge=1, le=MAX_REPEATS)] = Field(
        1,
        description="Questions for each criterion, in other words; every other one has the scale the other way round.",
    )
    swap: bool = Field(True, description="Grade the solutions of a pair in both orders.")
    in_place: bool | None = Field(
        None,
        description="Ask behind the branch itself, thoughts included, instead of showing the solution in a prompt of "
        "its own. Without it wherever the model is the job's own.",
    )
    aggregation: Aggregation = "last"
    reads: ReadParts = "answer"

    @model_validator(mode="after")
    def _check_grades(self) -> Self:
        if isinstance(self.grades, dict) and not 2 <= len(self.grades) <= MAX_LABELS:
            raise ValueError(f"'grades' needs 2 to {MAX_LABELS} grades, each with its score")
        return self

    @property
    def can_read_branches(self) -> bool:
        return self.in_place is not False

    @property
    def grade_scores(self) -> dict[str, float]:
        """Grades with their scores, the worst first."""
        scores = SCALES[self.grades] if isinstance(self.grades, str) else self.grades
        return dict(sorted(scores.items(), key=lambda entry: entry[1]))


class ProbeVerifier(VerifierSpec):
    """A probe reads the policy's own hidden states at the end of each branch, at no cost in tokens."""

    kind: Literal["probe"] = "probe"
    scores_steps: ClassVar[bool] = True
    model: str | None = Field(
        None,
        description="Name of a served model with a probe; without it the job's own. Another name is for a policy on a "
        "server that reads no probes: the same weights, served by this engine, compute each score.",
    )
    aggregation: Aggregation = "last"


class OutcomeVerifier(VerifierSpec):
    """An outcome reward model scores finished solutions."""

    kind: Literal["outcome"] = "outcome"
    model: str | None = Field(None, description="Name of a served outcome reward model; without it the only one.")
    reads: ReadParts = "answer"


class UnknownVerifier(VerifierSpec):
    """A verifier of a package that this process lacks, in a job that is only shown."""

    model_config = ConfigDict(extra="allow")


_UNKNOWN = "unknown kind"
"""The tag of ``UnknownVerifier``, which no kind has."""
_accepts_unknown: ContextVar[bool] = ContextVar("accepts_unknown", default=False)


@contextmanager
def accept_unknown_verifiers() -> Iterator[None]:
    """Accept jobs with verifiers of any kind, as clients must, which show jobs and run none."""
    token = _accepts_unknown.set(True)
    try:
        yield
    finally:
        _accepts_unknown.reset(token)


def get_verifier_kind(value: Any) -> str | None:
    """Return the tag of the member of ``Verifier`` that ``value`` selects; without ``kind`` a process reward model."""
    kind = str(value.get("kind", "prm") if isinstance(value, dict) else getattr(value, "kind", "prm"))
    if kind in load_verifier_kinds():
        return kind
    return _UNKNOWN if isinstance(value, UnknownVerifier) or _accepts_unknown.get() else None


_OWN_KINDS: tuple[type[VerifierSpec], ...] = (
    PrmVerifier,
    JudgeVerifier,
    OutcomeVerifier,
    ProbeVerifier,
    GenerativeVerifier,
    PairwiseVerifier,
    GradedVerifier,
    *RULES,
)


@cache
def load_verifier_kinds() -> Mapping[str, Plugin[type[VerifierSpec]]]:
    """Return the models of all kinds of verifiers with their packages, the service's own first."""
    own = {kind: Plugin(kind, OWN_PACKAGE, model) for model in _OWN_KINDS for kind in _list_kinds(model)}
    return own | {plugin.name: plugin for plugin in load_plugins(VERIFIERS_GROUP, own.keys(), _read_plugin)}


def verifier_kinds() -> dict[str, type[VerifierSpec]]:
    """Return the model of each kind of verifier."""
    return {kind: plugin.value for kind, plugin in load_verifier_kinds().items()}


def _read_plugin(value: object) -> tuple[str, type[VerifierSpec]]:
    if not (isinstance(value, type) and issubclass(value, VerifierSpec)):
        raise PluginError(f"{value!r} is no subclass of VerifierSpec (reasoner.base_model)")
    kinds = _list_kinds(value)
    if len(kinds) != 1:
        raise PluginError("its 'kind' is no Literal of one text")
    checks = issubclass(value, RuleSpec) and value.check is not RuleSpec.check
    if not checks and not iscoroutinefunction(getattr(value, "open", None)):
        raise PluginError("it has neither an async method 'open' nor, as a RuleSpec, a method 'check'")
    try:
        value.model_json_schema()
    except Exception as error:
        raise PluginError(f"its parameters have no JSON schema: {error}") from error
    return kinds[0], value


def _list_kinds(model: type[VerifierSpec]) -> tuple[str, ...]:
    return tuple(kind for kind in get_args(model.model_fields["kind"].annotation) if isinstance(kind, str))


class _InstalledKinds:
    """Annotation that becomes the union of all kinds once a model with it is built.

    Not when this module is imported: the module of a plug-in imports it, too.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = verifier_kinds()
        members = (
            *(Annotated[model, Tag(kind)] for kind, model in kinds.items()),
            Annotated[SkipJsonSchema[UnknownVerifier], Tag(_UNKNOWN)],
        )
        unusable = explain_unusable(VERIFIERS_GROUP)
        discriminator = Discriminator(
            get_verifier_kind,
            custom_error_type="verifier_kind",
            custom_error_message=f"unknown kind of verifier; use one of {', '.join(kinds)}{unusable}",
        )
        return handler.generate_schema(Annotated[Union[members], discriminator])  # noqa: UP007  # a tuple of types


if TYPE_CHECKING:
    Verifier = VerifierSpec
else:
    Verifier = Annotated[Any, _InstalledKinds()]  # FastAPI would list the base class in the schema
