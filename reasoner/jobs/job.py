"""A job as the API shows it: its status, its result and its bill. These models are the REST schema."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reasoner.answers.votes import Vote
from reasoner.base_model import StrictModel
from reasoner.budget.usage import Usage
from reasoner.jobs.spec import JobSpec

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
TERMINAL_STATUSES: frozenset[str] = frozenset({"completed", "incomplete", "failed", "cancelled"})


class JobResult(StrictModel):
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


class JobError(StrictModel):
    code: str
    message: str


class Delivery(StrictModel):
    """What became of a job's webhook."""

    state: Literal["pending", "delivered", "failed"]
    attempts: int
    error: str | None
    """Of the last attempt that failed."""


class Job(StrictModel):
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
