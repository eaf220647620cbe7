"""Batches: jobs that share one token budget. These models are part of the REST schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator

from reasoner.base_model import StrictModel
from reasoner.budget.spec import MAX_BUDGET_TOKENS
from reasoner.budget.usage import Usage
from reasoner.jobs.job import Status
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import MAX_METADATA_KEYS

MAX_BATCH_JOBS = 1000

BatchStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
"""``queued``: no job has begun. All others but ``in_progress``: all jobs have ended. ``cancelled``: the batch was
cancelled before that, or each of its jobs was. Otherwise jobs that were cancelled individually do not count:
``completed`` or ``failed`` if all others are, else ``incomplete``."""


def get_final_status(counts: Mapping[Status, int], *, cancelled: bool) -> BatchStatus:
    """Return the status of a batch whose jobs have all ended.

    ``counts`` is the number of jobs by status, ``cancelled`` is True if the batch as a whole was cancelled.
    """
    ends = {status for status, count in counts.items() if count and status != "cancelled"}
    if cancelled or not ends:
        return "cancelled"
    if ends == {"completed"}:
        return "completed"
    return "failed" if ends == {"failed"} else "incomplete"


class BatchBudget(StrictModel):
    """The limit of all jobs of a batch together."""

    tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] = Field(
        description="Generated tokens plus tokens that the verifier computes, of all jobs together."
    )


class BatchSpec(StrictModel):
    """Jobs that share a budget. A job's own budget, if it has one, is a cap on its part."""

    jobs: Annotated[list[JobRequest], Field(min_length=1, max_length=MAX_BATCH_JOBS)]
    budget: BatchBudget
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA_KEYS)] = Field(
        default_factory=dict
    )

    @field_validator("budget")
    @classmethod
    def _check_one_token_per_job(cls, value: BatchBudget, info: Any) -> BatchBudget:
        jobs = info.data.get("jobs", [])
        if value.tokens < len(jobs):
            raise ValueError(f"{value.tokens} tokens are too few for {len(jobs)} jobs: give at least one token per job")
        return value


class BatchJob(StrictModel):
    """Summary of a job of a batch; ``GET /v1/jobs/{id}`` returns the whole job."""

    id: str
    status: Status
    answer: str | None
    tokens: int
    """Tokens spent."""
    granted: int
    """Tokens of the shared budget granted so far."""


class Batch(StrictModel):
    """A batch as the API shows it. Times are seconds since the epoch."""

    id: str
    status: BatchStatus = Field(
        description="'queued', 'in_progress'; when all jobs have ended: 'completed' (all have an answer), 'failed' "
        "(all failed), 'incomplete' (anything else), 'cancelled' (the batch was). Jobs that were cancelled one by one "
        "do not count."
    )
    created_at: float
    finished_at: float | None
    budget: BatchBudget
    metadata: dict[str, JsonValue]
    usage: Usage
    """Total of all jobs."""
    counts: dict[Status, int]
    """Number of jobs by status."""
    unassigned: int
    """Tokens of the shared budget that are granted to no job."""
    jobs: list[BatchJob] | None = None
    """Jobs in order of submission; omitted in lists of batches."""
