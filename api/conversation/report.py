"""The ``reasoner`` field of answers: the job behind them, and the tokens that they do not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel

from api.conversation.narration import JobEnd
from reasoner.answers.votes import Vote
from reasoner.budget.spec import Budget
from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobError, Status
from reasoner.tree import AnswerLevel
from workers.store.serialization import JobDocument


def show_model(spec: Mapping[str, Any]) -> str:
    """Return the model of a job as its client gave it: a name, or the model itself."""
    return str(spec.get("name") or spec["model"])


class Report(BaseModel):
    """The job behind an answer; ``GET /v1/jobs/{job}`` has all of it."""

    job: str
    status: Status
    answer: str | None
    answer_level: AnswerLevel | None = None
    confidence: float | None
    votes: list[Vote]
    abstained: int | None
    finish_reason: str | None
    strategy: dict[str, Any]
    budget: Budget
    seed: int
    usage: Usage
    error: JobError | None

    @classmethod
    def from_job(cls, job: JobDocument, end: JobEnd | None) -> Self:
        """Return the report of a job; ``end`` is None while it runs."""
        spec, result = job["spec"], end and end.result
        return cls(
            job=job["id"],
            status=end.status if end else job["status"],
            answer=result.answer if result else None,
            answer_level=result.answer_level if result else None,
            confidence=result.confidence if result else None,
            votes=result.votes if result else [],
            abstained=result.abstained if result else None,
            finish_reason=result.finish_reason if result else None,
            strategy=spec["strategy"],
            budget=spec["budget"],
            seed=spec["seed"],
            usage=end.usage if end else job["usage"],
            error=end.error if end else None,
        )


def count_reasoning_tokens(end: JobEnd) -> int:
    """Return the tokens that the answer does not show: other branches, thinking and the verifier."""
    return max(0, end.usage.total - end.num_visible_tokens)
