"""Batches: jobs that are given together, or as the lines of a file, and may share one token budget.

These models are part of the REST schema. ``Batch`` is OpenAI's batch object with fields of this service beside it.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from reasoner.base_model import StrictModel
from reasoner.budget.spec import MAX_BUDGET_TOKENS
from reasoner.budget.usage import Usage
from reasoner.jobs.job import Status
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import MAX_METADATA_KEYS, StrategySpec
from reasoner.jobs.verifier_specs import Verifier

MAX_BATCH_JOBS = 1000
MAX_BATCH_LINES = 50_000
MAX_WINDOW_SECONDS = 30 * 86_400
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_SHARED_FIELDS = ("strategy", "verifier", "model")

Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA_KEYS)]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
"""OpenAI's words. ``failed``: the input as a whole was refused. Otherwise a batch that all of its requests have left is
``completed``, however they ended: ``request_counts`` tells that."""
ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class BatchBudget(StrictModel):
    """The limit of all jobs of a batch together."""

    tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] = Field(
        description="Generated tokens plus tokens that the verifier computes, of all jobs together."
    )


class BatchSpec(StrictModel):
    """Jobs that share a budget. A job's own budget, if it has one, is a cap on its part."""

    jobs: Annotated[list[JobRequest], Field(min_length=1, max_length=MAX_BATCH_JOBS)]
    budget: BatchBudget
    metadata: Metadata = Field(default_factory=dict)

    @field_validator("budget")
    @classmethod
    def _check_one_token_per_job(cls, value: BatchBudget, info: Any) -> BatchBudget:
        jobs = info.data.get("jobs", [])
        if value.tokens < len(jobs):
            raise ValueError(f"{value.tokens} tokens are too few for {len(jobs)} jobs: give at least one token per job")
        return value


class OutputExpiry(StrictModel):
    """The time for which the files of results are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86_400)]


class FileBatchSpec(StrictModel):
    """OpenAI's batch: each line of a file is a request. ``budget`` and the fields after it are of this service.

    A client that can send OpenAI's fields alone gives them in ``metadata``: ``budget_tokens``, ``strategy`` (a name, or
    JSON) and ``model``.
    """

    input_file_id: Annotated[str, Field(max_length=64)] = Field(description="A file with the purpose 'batch'.")
    endpoint: str = Field(description="The endpoint that answers each line, which names it as its 'url'.")
    completion_window: str = Field(
        description="The time, such as 24h, 90m or 7d, at which lines that have not ended become errors."
    )
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None
    budget: BatchBudget | None = Field(
        None, description="The budget that all lines share; by default each has its own."
    )
    strategy: StrategySpec | None = Field(None, description="The strategy of lines that name none.")
    verifier: Verifier | None = Field(None, description="The verifier of lines that name none.")
    model: str | None = Field(None, description="The model of lines that name none.")

    @field_validator("completion_window")
    @classmethod
    def _check_window(cls, value: str) -> str:
        if not 0 < _read_seconds(value) <= MAX_WINDOW_SECONDS:
            raise ValueError("give a number of minutes, hours or days up to 30 days, such as '24h', '90m' or '7d'")
        return value

    @model_validator(mode="after")
    def _read_metadata(self) -> Self:
        metadata = self.metadata or {}
        own: dict[str, Any] = {name: metadata[name] for name in ("strategy", "model") if name in metadata}
        if "budget_tokens" in metadata:
            own["budget"] = _read_budget(metadata["budget_tokens"])
        if "strategy" in own:
            own["strategy"] = _read_strategy(own["strategy"])
        for name, value in own.items():
            if getattr(self, name) is not None:
                raise ValueError(f"give {name!r} as a field or in 'metadata', not both")
            setattr(self, name, value)
        return self

    @property
    def window_seconds(self) -> int:
        """The completion window in seconds."""
        return _read_seconds(self.completion_window)

    @property
    def line_defaults(self) -> dict[str, Any]:
        """The fields of lines that do not give them."""
        return self.model_dump(include=set(_SHARED_FIELDS), exclude_none=True)


def _read_seconds(window: str) -> int:
    match = re.fullmatch("([0-9]{1,6})([mhd])", window)
    return int(match[1]) * _UNITS[match[2]] if match else 0


def _read_budget(text: str) -> BatchBudget:
    tokens = int(text) if re.fullmatch("[0-9]{1,15}", text) else 0
    if not 1 <= tokens <= MAX_BUDGET_TOKENS:
        raise ValueError(f"metadata.budget_tokens: give a number of tokens from 1 to {MAX_BUDGET_TOKENS}, not {text!r}")
    return BatchBudget(tokens=tokens)


def _read_strategy(text: str) -> StrategySpec:
    if not text.startswith("{"):
        return StrategySpec(name=text)
    try:
        return StrategySpec.model_validate(json.loads(text))
    except ValueError as error:
        raise ValueError(f"metadata.strategy: give the name of a strategy, or JSON of one: {error}") from None


class BatchJob(StrictModel):
    """Summary of a job of a batch; ``GET /v1/jobs/{id}`` returns the whole job."""

    id: str
    status: Status
    answer: str | None
    tokens: int
    """Tokens spent."""
    granted: int
    """Tokens of the shared budget granted so far."""


class CachedInput(StrictModel):
    cached_tokens: int = 0


class ReasoningOutput(StrictModel):
    reasoning_tokens: int = 0


class BatchUsage(Usage):
    """The bill of all jobs, in the words of jobs and in OpenAI's. ``reasoning_tokens`` are those of thoughts."""

    input_tokens: int = 0
    input_tokens_details: CachedInput = Field(default_factory=CachedInput)
    output_tokens: int = 0
    output_tokens_details: ReasoningOutput = Field(default_factory=ReasoningOutput)
    total_tokens: int = 0

    @classmethod
    def from_usage(cls, usage: Usage) -> Self:
        """Return the bill in both words."""
        return cls(
            **usage.model_dump(),
            input_tokens=usage.prompt,
            input_tokens_details=CachedInput(cached_tokens=usage.cached),
            output_tokens=usage.total,
            output_tokens_details=ReasoningOutput(reasoning_tokens=usage.thought),
            total_tokens=usage.prompt + usage.total,
        )


class RequestCounts(StrictModel):
    """Requests that ended with an answer (``completed``) or without one (``failed``), of ``total``."""

    total: int
    completed: int
    failed: int


class BatchError(StrictModel):
    """A reason why a batch failed. ``line`` is the number of a line of the file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(StrictModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class Batch(StrictModel):
    """A batch as the API shows it, in OpenAI's format. Times are whole seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    """The endpoint of all lines; ``/v1/jobs`` if the jobs were not given as a file."""
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    """The file of the requests; empty if the jobs were not given as a file."""
    completion_window: str
    """``none`` if the jobs were not given as a file."""
    status: BatchStatus
    output_file_id: str | None
    """The file of answers, once all lines have ended, if there is any."""
    error_file_id: str | None
    """The file of lines without an answer, likewise."""
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, JsonValue]
    budget: BatchBudget | None
    """The shared budget; ``None``: each job has its own."""
    counts: dict[Status, int]
    """Number of jobs by status; lines that cannot become a job are not among them."""
    unassigned: int | None
    """Tokens of the shared budget that are granted to no job."""
    jobs: list[BatchJob] | None = None
    """Jobs in order of submission; omitted in lists of batches, and for files."""

    @property
    def has_ended(self) -> bool:
        """True if nothing of the batch changes any more."""
        return self.status in ENDED
