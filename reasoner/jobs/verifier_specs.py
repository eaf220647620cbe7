"""The verifiers that a job can ask for: one model per kind, discriminated by ``kind``.

To add a kind, add its model here and its scorer in ``reasoner.verifiers``. No kind takes an address: the service's
configuration alone decides which servers are contacted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

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
from reasoner.jobs.rule_specs import (
    ExactVerifier,
    JsonSchemaVerifier,
    MathVerifier,
    NumericVerifier,
    PythonVerifier,
    RegexVerifier,
)
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


class JudgeVerifier(VerifierSpec):
    """A language model is asked whether the solution is right so far; the score is its probability of "Yes"."""

    kind: Literal["judge"] = "judge"
    scores_steps: ClassVar[bool] = True
    model: str | None = Field(None, description="Name of a served language model; without it the job's own.")
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
Template = Annotated[str, Field(min_length=1, max_length=32_000)]


class WrittenVerifier(VerifierSpec):
    """Fields of verifiers whose model writes a critique before its verdict."""

    model: str | None = Field(None, description="Name of a served language model; without it the job's own.")
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


def get_verifier_kind(value: Any) -> str:
    """Return the tag of the member of ``Verifier`` that ``value`` selects; without ``kind`` a process reward model."""
    kind = value.get("kind", "prm") if isinstance(value, dict) else getattr(value, "kind", "prm")
    return str(kind)


_Kinds = (
    Annotated[PrmVerifier, Tag("prm")]
    | Annotated[JudgeVerifier, Tag("judge")]
    | Annotated[OutcomeVerifier, Tag("outcome")]
    | Annotated[ProbeVerifier, Tag("probe")]
    | Annotated[GenerativeVerifier, Tag("generative")]
    | Annotated[PairwiseVerifier, Tag("pairwise")]
    | Annotated[ExactVerifier, Tag("exact")]
    | Annotated[NumericVerifier, Tag("numeric")]
    | Annotated[MathVerifier, Tag("math")]
    | Annotated[RegexVerifier, Tag("regex")]
    | Annotated[JsonSchemaVerifier, Tag("json_schema")]
    | Annotated[PythonVerifier, Tag("python")]
)

VERIFIER_KINDS: dict[str, type[VerifierSpec]] = {
    get_args(member)[1].tag: get_args(member)[0] for member in get_args(_Kinds)
}

Verifier = Annotated[
    _Kinds,
    Discriminator(
        get_verifier_kind,
        custom_error_type="verifier_kind",
        custom_error_message=f"unknown kind of verifier; use one of {', '.join(VERIFIER_KINDS)}",
    ),
]
