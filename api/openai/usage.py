"""What OpenAI's answers say of a search beyond OpenAI's own words, and its usage in those."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel

from api.openai.narration import End
from reasoner.answers.votes import Vote
from reasoner.budget.spec import Budget
from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobError, Status
from workers.store.serialization import JobDocument


class Report(BaseModel):
    """The job behind an answer, as it ran: ``GET /v1/jobs/{job}`` has all of it."""

    job: str
    status: Status
    answer: str | None
    confidence: float | None
    votes: list[Vote]
    finish_reason: str | None
    strategy: dict[str, Any]
    budget: Budget
    seed: int
    usage: Usage
    error: JobError | None

    @classmethod
    def of(cls, job: JobDocument, end: End | None) -> Self:
        """Of a job that may not have ended."""
        spec, result = job["spec"], end and end.result
        return cls(
            job=job["id"],
            status=end.status if end else job["status"],
            answer=result.answer if result else None,
            confidence=result.confidence if result else None,
            votes=result.votes if result else [],
            finish_reason=result.finish_reason if result else None,
            strategy=spec["strategy"],
            budget=spec["budget"],
            seed=spec["seed"],
            usage=end.usage if end else job["usage"],
            error=end.error if end else None,
        )


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


def reasoning_tokens(end: End) -> int:
    """All that was spent on what the answer does not show: other branches, thoughts, the verifier."""
    return max(0, end.usage.total - end.visible)
