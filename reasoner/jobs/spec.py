"""What a client may ask for and what comes back. These models are the REST schema; unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from reasoner.answers.spec import AnswerSpec, CodeExtract
from reasoner.base_model import Strict
from reasoner.jobs.verifier_specs import KINDS, PrmVerifier, Verifier

MAX_PROBLEM_CHARS = 32_000
MAX_N = 256
MAX_TOP_K = 1_000_000
"""More tokens than any vocabulary has."""
MAX_BUDGET_TOKENS = 10_000_000
MAX_BUDGET_SECONDS = 86_400.0
MAX_BUDGET_FLOPS = 1e24
MAX_BUDGET_COST = 1e6
MAX_METADATA_KEYS = 16
MAX_SEQ = 2**53
"""Largest number of an event: more than any job has, and JavaScript can hold it."""
MAX_ADDRESS_CHARS = 2048
BEST = "best_of_n"
VOTE = "self_consistency"
"""Strategies of jobs that name none: with a verifier, and without one."""

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
TERMINAL: frozenset[str] = frozenset({"completed", "incomplete", "failed", "cancelled"})


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)]


class Budget(Strict):
    """The most that a job may spend; the first limit that is reached ends the search."""

    tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] | None = Field(
        None, description="Generated tokens plus tokens that the verifier computes."
    )
    seconds: Annotated[float, Field(gt=0, le=MAX_BUDGET_SECONDS)] | None = Field(
        None, description="Seconds of work, waiting in the queue not included."
    )
    flops: Annotated[float, Field(gt=0, le=MAX_BUDGET_FLOPS)] | None = Field(
        None, description="Two per weight and computed token, of the model and of the verifier."
    )
    cost: Annotated[float, Field(gt=0, le=MAX_BUDGET_COST)] | None = Field(
        None, description="Money, by the prices that the service is configured with."
    )
    effort: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="Name of a budget that the service is configured with: minimal, low, medium, high, …"
    )


class Sampling(Strict):
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K, description="0: all tokens.")] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] | None = Field(
        None, description="Longest solution in tokens; without it the model's context is the limit."
    )


class StrategySpec(BaseModel):
    """A strategy's name and its own parameters, side by side; the registry checks the parameters."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    name: str

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class JobSpec(Strict):
    """A question, a way to search for its answer, and what the search may cost."""

    problem: Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=64)] | None = None
    model: str | None = Field(None, description="Name of a served model; without it the service's own.")
    strategy: StrategySpec = Field(
        default_factory=lambda: StrategySpec(name=BEST),
        description=f"By default {BEST}, or {VOTE} without a verifier; an effort and the model may have their own.",
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
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("the problem is empty: write the question")
        return value

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, value: StrategySpec) -> StrategySpec:
        from reasoner.strategies.registry import resolve

        params = resolve(value.name, value.params)
        return StrategySpec.model_validate({"name": value.name, **params.model_dump()})

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        if (self.problem is None) == (self.messages is None):
            raise ValueError("give either 'problem' or 'messages'")
        return self

    @model_validator(mode="after")
    def _vote_without_verifier(self) -> Self:
        from reasoner.strategies.registry import STRATEGIES

        if self.verifier is None and STRATEGIES[self.strategy.name].needs_verifier:
            if "strategy" in self.model_fields_set:
                raise ValueError(
                    f"strategy {self.strategy.name!r} needs a verifier, and the job says that it has none: use {VOTE}"
                )
            self.strategy = StrategySpec(name=VOTE)
            self.model_fields_set.remove("strategy")  # an effort or the model's defaults may still choose
        return self

    @model_validator(mode="after")
    def _verifier_is_of_use(self) -> Self:
        from reasoner.strategies.registry import STRATEGIES

        if self.verifier is None:
            return self
        if STRATEGIES[self.strategy.name].needs_steps and not self.verifier.scores_steps:
            fitting = [name for name, kind in KINDS.items() if kind.scores_steps]
            raise ValueError(
                f"strategy {self.strategy.name!r} needs a verifier of single steps, and {self.verifier.kind!r} scores "
                f"finished solutions alone: use one of {', '.join(fitting)}"
            )
        return self

    @model_validator(mode="after")
    def _answer_is_what_is_tested(self) -> Self:
        kind = "" if self.verifier is None else self.verifier.kind
        language = {"python": "python", "json_schema": "json"}.get(kind)
        if "answer" not in self.model_fields_set and language is not None:
            self.answer = AnswerSpec(compare="code", extract=CodeExtract(code=language))
        return self

    @model_validator(mode="after")
    def _confidence_is_heard(self) -> Self:
        from reasoner.strategies.registry import STRATEGIES

        if self.confidence is not None and not STRATEGIES[self.strategy.name].stops_when_sure:
            able = ", ".join(name for name, strategy in STRATEGIES.items() if strategy.stops_when_sure)
            raise ValueError(f"'confidence' means nothing to strategy {self.strategy.name!r}; it stops {able}")
        return self

    @property
    def has_certain_verifier(self) -> bool:
        """Return True if a score of 1 is a fact, so that nothing can be better."""
        return self.verifier is not None and self.verifier.certain

    def conversation(self) -> list[dict[str, str]]:
        """The question as chat messages."""
        if self.messages is not None:
            return [message.model_dump() for message in self.messages]
        return [{"role": "user", "content": self.problem or ""}]


class Usage(Strict):
    """The bill. Counts are tokens; ``total`` is what a token budget is held against."""

    prompt: int = 0
    """Prompt tokens sent to the model, over all requests."""
    cached: int = 0
    """Those of ``prompt`` whose KV was in the cache."""
    generated: int = 0
    drafted: int = 0
    """Guesses at generated tokens that the model computed. No token budget is held against them."""
    accepted: int = 0
    """Those of ``drafted`` that were right: they are among ``generated``."""
    verifier_computed: int = 0
    verifier_cached: int = 0
    pruned: int = 0
    """Generated tokens in branches that the search gave up."""
    seconds: float = 0.0
    flops: float = 0.0
    """Estimated: two per weight and computed token, wrong guesses included; a drafter's own are not counted."""
    cost: float = 0.0
    """By the service's prices per token; 0 where it has none."""

    @property
    def total(self) -> int:
        return self.generated + self.verifier_computed

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.model_fields})


class Vote(Strict):
    """One class of equivalent answers: how many candidates gave it and their weight together."""

    answer: str
    count: int
    weight: float


class JobResult(Strict):
    """The result of a search. ``answer`` is ``None`` when no candidate stated one.

    A job that was cancelled has what it had found by then, and none if its search had not begun.
    """

    answer: str | None
    text: str | None
    """The chosen solution; without an answer the most promising one, as far as it came."""
    confidence: float | None
    votes: list[Vote] = Field(default_factory=list)
    finish_reason: Literal["answer", "budget", "no_answer", "cancelled"]
    """``budget``: the search ended because the budget did."""
    node: str | None
    """Id of the chosen leaf in the tree."""


class JobError(Strict):
    code: str
    message: str


class Delivery(Strict):
    """What became of a job's webhook."""

    state: Literal["pending", "delivered", "failed"]
    attempts: int
    error: str | None
    """Of the last attempt that failed."""


class Job(Strict):
    """A job as the API shows it. Times are seconds since the epoch."""

    id: str
    status: Status
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    attempt: int = 0
    """Workers that took it so far, without those that handed it back."""
    last_seq: int = 0
    """Sequence number of the newest event."""
    batch: str | None = None
    """The batch whose budget it shares."""
    spec: JobSpec
    usage: Usage = Field(default_factory=Usage)
    result: JobResult | None = None
    error: JobError | None = None
    delivery: Delivery | None = None
    """Of a job that has ended and has a webhook."""


class Event(Strict):
    """One entry of a job's journal. ``seq`` counts from 1 without gaps; a replay uses entries that have a ``key``."""

    seq: int
    type: str
    at: float
    key: str | None = None
    data: dict[str, JsonValue]
    spend: dict[str, float] = Field(default_factory=dict)
    """What it added to the bill: the fields of ``Usage`` that are not 0. All of a job's add up to its ``usage``."""
