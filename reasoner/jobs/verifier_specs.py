"""The verifiers that a job can ask for: one model per kind, discriminated by ``kind``.

To add a kind, add its model here and its scorer in ``reasoner.verifiers``. No kind takes an address: the service's
configuration alone decides which servers are contacted.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag

from reasoner.base_model import VerifierSpec
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
