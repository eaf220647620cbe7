"""The results of the tools: a job as an agent needs it, with its bill and the state of its search."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import Field

from reasoner.answers.votes import Vote
from reasoner.base_model import StrictModel
from reasoner.budget.usage import Usage
from reasoner.jobs.job import TERMINAL_STATUSES, FinishReason, Job, JobError, RankedCandidate, Status

MAX_ANSWERS = 8
"""Answers of a search, and votes, that a result lists."""


class Bill(StrictModel):
    """The cost of the job so far."""

    tokens: int = Field(description="What a budget of tokens is held against: generated and computed by the verifier.")
    prompt: int
    cached: int
    generated: int
    thought: int
    verifier: int
    seconds: float
    cost: float = Field(description="By the service's prices; 0 without prices.")


class FoundAnswer(StrictModel):
    """An answer of finished solutions, by their number and the best score."""

    answer: str
    count: int
    score: float | None = None


class SearchSummary(StrictModel):
    """The search tree so far, in numbers."""

    branches: int
    live: int = Field(description="Branches that are being written.")
    pruned: int
    answers: list[FoundAnswer] = Field(description="The most frequent first.")


class JobOutput(StrictModel):
    """A job. It has an answer once its status is completed, or the best so far in one that was cancelled."""

    job_id: str
    status: Status = Field(description="completed, incomplete, failed and cancelled are ends.")
    answer: str | None = Field(None, description="Absent where the chosen solution states none.")
    text: str | None = Field(None, description="The chosen solution, without its thought.")
    confidence: float | None = Field(None, description="Share of the vote, score of the verifier, or probability.")
    finish_reason: FinishReason | None = None
    note: str | None = None
    votes: list[Vote] | None = None
    ranking: list[RankedCandidate] | None = Field(None, description="The candidates of 'select', the best first.")
    error: JobError | None = None
    search: SearchSummary | None = None
    next_step: str | None = Field(None, description="What to do while the job has not ended.")
    usage: Bill


def build_output(job: Job, tree: dict[str, Any] | None = None) -> JobOutput:
    """Return a job for an agent; ``tree`` as of ``GET /v1/jobs/{id}/tree``."""
    has_ended = job.status in TERMINAL_STATUSES
    output = JobOutput(
        job_id=job.id,
        status=job.status,
        error=job.error,
        search=None if tree is None else _summarize_tree(tree),
        next_step=None if has_ended else f"call 'job' with job_id {job.id!r} and wait_seconds for the result",
        usage=_build_bill(job.usage),
    )
    result = job.result
    if result is None:
        return output
    return output.model_copy(
        update={
            "answer": result.answer,
            "text": result.content or result.text,
            "confidence": result.confidence,
            "finish_reason": result.finish_reason,
            "note": result.note,
            "votes": result.votes[:MAX_ANSWERS] or None,
            "ranking": result.ranking or None,
        }
    )


def _build_bill(usage: Usage) -> Bill:
    return Bill(
        tokens=usage.total,
        prompt=usage.prompt,
        cached=usage.cached,
        generated=usage.generated,
        thought=usage.thought,
        verifier=usage.verifier_computed,
        seconds=usage.seconds,
        cost=usage.cost,
    )


def _summarize_tree(tree: dict[str, Any]) -> SearchSummary:
    nodes, scores = tree["nodes"], dict[str, float]()
    solutions = [node for node in nodes if node["answer"] is not None]
    for node in solutions:
        if node["score"] is not None:
            scores[node["answer"]] = max(node["score"], scores.get(node["answer"], 0.0))
    counts = Counter(node["answer"] for node in solutions)
    return SearchSummary(
        branches=len(nodes),
        live=sum(node["state"] == "live" for node in nodes),
        pruned=sum(node["state"] == "pruned" for node in nodes),
        answers=[
            FoundAnswer(answer=answer, count=count, score=scores.get(answer))
            for answer, count in counts.most_common(MAX_ANSWERS)
        ],
    )
