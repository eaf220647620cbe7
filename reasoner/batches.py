"""Batches: many jobs under one budget of tokens. These models are the REST schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator

from reasoner.jobs import MAX_BUDGET_TOKENS, MAX_METADATA_KEYS, JobSpec, Status, Usage
from reasoner.strict import Strict

MAX_BATCH_JOBS = 1000

BatchStatus = Literal["queued", "in_progress", "completed", "cancelled"]
"""``queued``: no job has begun. ``completed``: all have ended, each in its own way. ``cancelled``: likewise, and the
batch was cancelled before."""


class BatchBudget(Strict):
    """What all jobs of a batch may spend together."""

    tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] = Field(
        description="Generated tokens plus tokens that the verifier computes, of all jobs together."
    )


class BatchSpec(Strict):
    """Jobs that share a budget. A job's own budget, if it has one, is a cap on its part."""

    jobs: Annotated[list[JobSpec], Field(min_length=1, max_length=MAX_BATCH_JOBS)]
    budget: BatchBudget
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA_KEYS)] = Field(
        default_factory=dict
    )

    @field_validator("budget")
    @classmethod
    def _a_token_for_each(cls, value: BatchBudget, info: Any) -> BatchBudget:
        jobs = info.data.get("jobs", [])
        if value.tokens < len(jobs):
            raise ValueError(f"{value.tokens} tokens are less than one for each of {len(jobs)} jobs")
        return value


class BatchJob(Strict):
    """A job of a batch in short; ``GET /v1/jobs/{id}`` has all of it."""

    id: str
    status: Status
    answer: str | None
    tokens: int
    """Spent."""
    granted: int
    """Tokens of the shared budget that it was given so far."""


class Batch(Strict):
    """A batch as the API shows it. Times are seconds since the epoch."""

    id: str
    status: BatchStatus
    created_at: float
    finished_at: float | None
    budget: BatchBudget
    metadata: dict[str, JsonValue]
    usage: Usage
    """Of all jobs together."""
    counts: dict[Status, int]
    """Jobs by status."""
    unassigned: int
    """Tokens of the shared budget that no job holds."""
    jobs: list[BatchJob] | None = None
    """In the order of submission; left out in lists of batches."""
