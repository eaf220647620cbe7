"""The specification of a job. These models are part of the REST schema; unknown fields are rejected."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from reasoner.answers.spec import AnswerSpec, CodeExtract
from reasoner.base_model import StrictModel
from reasoner.budget.spec import MAX_BUDGET_TOKENS, Budget
from reasoner.jobs.verifier_specs import PrmVerifier, Verifier

MAX_PROBLEM_CHARS = 32_000
MAX_N = 256
MAX_TOP_K = 1_000_000
"""Larger than any vocabulary."""
MAX_METADATA_KEYS = 16
MAX_ADDRESS_CHARS = 2048
DEFAULT_STRATEGY = "best_of_n"
FALLBACK_STRATEGY = "self_consistency"
"""Strategies of jobs that name none: ``DEFAULT_STRATEGY`` with a verifier, ``FALLBACK_STRATEGY`` without one."""


class Message(StrictModel):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)]


class Sampling(StrictModel):
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K, description="0: all tokens.")] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] | None = Field(
        None, description="Longest solution in tokens; without it the model's context is the limit."
    )


class StrategySpec(BaseModel):
    """A strategy's name and, beside it, its own parameters, which ``reasoner.admission`` validates."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    name: str

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class JobSpec(StrictModel):
    """A question, a way to search for its answer, and what the search may cost."""

    problem: Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=64)] | None = None
    model: str | None = Field(None, description="Name of a served model; without it the service's own.")
    strategy: StrategySpec = Field(
        default_factory=lambda: StrategySpec(name=DEFAULT_STRATEGY),
        description=f"By default {DEFAULT_STRATEGY}, or {FALLBACK_STRATEGY} without a verifier; an effort and the "
        "model may have their own.",
    )
    budget: Budget = Field(default_factory=Budget)
    sampling: Sampling = Field(default_factory=Sampling)
    verifier: Verifier | None = Field(
        default_factory=PrmVerifier, description="Without one the service's own, if it has one; null: none."
    )
    answer: AnswerSpec = Field(
        default_factory=AnswerSpec, description="Where a solution states its answer, and how answers are compared."
    )
    confidence: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Stop as soon as the answer is right, or stays the leader, with this probability. For strategies "
        "that stop by it: see stops_when_sure of GET /v1/strategies.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(None, description="Without it one is drawn and echoed.")
    deterministic: bool = Field(
        False,
        description="The same job and seed search the same tree, however quick each branch is; it may be slower. Of "
        "all limits only one in tokens ends the search at the same place.",
    )
    priority: Literal["interactive", "batch"] = "interactive"
    webhook: Annotated[str, Field(max_length=MAX_ADDRESS_CHARS)] | None = Field(
        None, description="An https address that is told how the job ended, signed as Standard Webhooks says."
    )
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA_KEYS)] = Field(
        default_factory=dict
    )

    @field_validator("problem")
    @classmethod
    def _check_not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("the problem is empty: write the question")
        return value

    @model_validator(mode="after")
    def _check_one_question(self) -> Self:
        if (self.problem is None) == (self.messages is None):
            raise ValueError("give either 'problem' or 'messages', not both")
        return self

    @model_validator(mode="after")
    def _use_fallback_without_verifier(self) -> Self:
        if self.verifier is None and "strategy" not in self.model_fields_set:
            self.strategy = StrategySpec(name=FALLBACK_STRATEGY)
            self.model_fields_set.remove("strategy")  # an effort or the model's defaults may still choose
        return self

    @model_validator(mode="after")
    def _compare_answer_as_verifier_does(self) -> Self:
        kind = "" if self.verifier is None else self.verifier.kind
        language = {"python": "python", "json_schema": "json"}.get(kind)
        if "answer" not in self.model_fields_set and language is not None:
            self.answer = AnswerSpec(compare="code", extract=CodeExtract(code=language))
        return self

    @property
    def has_conclusive_verifier(self) -> bool:
        """Return True if a score of 1 is a fact, so that nothing can be better."""
        return self.verifier is not None and self.verifier.is_conclusive

    def to_messages(self) -> list[dict[str, str]]:
        """Return the question as chat messages."""
        if self.messages is not None:
            return [message.model_dump() for message in self.messages]
        return [{"role": "user", "content": self.problem or ""}]
