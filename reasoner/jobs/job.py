"""A job as the API shows it: its status, its result and its bill. These models are the REST schema."""

from __future__ import annotations

from typing import Literal, cast

from pydantic import ConfigDict, Field

from reasoner.answers.votes import Vote
from reasoner.base_model import StrictModel
from reasoner.budget.usage import Usage
from reasoner.jobs.messages import CalledFunction
from reasoner.jobs.spec import JobSpec
from reasoner.tree import AnswerLevel

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
FinishReason = Literal["answer", "budget", "no_answer", "cancelled", "engine_unavailable"]
TERMINAL_STATUSES: frozenset[str] = frozenset({"completed", "incomplete", "failed", "cancelled"})


def find_end(event_type: str) -> Status | None:
    """Return the status with which an event of this type ends its job; ``None`` if the job goes on."""
    status = event_type.removeprefix("job.")
    return cast(Status, status) if status in TERMINAL_STATUSES else None


class RankedCandidate(StrictModel):
    """One of the candidates that a client gave, in the order of the ranking."""

    index: int
    """Its place in ``candidates``, from 0."""
    node: str
    answer: str | None
    answer_level: AnswerLevel | None = None
    score: float | None = None
    """The verifier's score."""
    share: float | None = None
    """The share of its answer, of all candidates; ``None`` without a vote, or for one that has no part in it."""
    strength: float | None = None
    """The strength in the tournament: the probability that it beats another is logistic in the difference."""
    best: float | None = None
    """The probability that it is the strongest of the tournament."""


class TopToken(StrictModel):
    """One of the likeliest tokens at a position. A token that is no whole character is ``token_id:`` and its id."""

    token: str
    logprob: float


class TokenProbability(TopToken):
    """A token of an answer, and the likeliest ones at its place, by the model's own distribution at temperature 1."""

    top: list[TopToken] = Field(default_factory=list)


class Alternative(StrictModel):
    """The best solution of an answer that came after the chosen one. Fields as in the result."""

    answer: str | None
    """``None`` only in a tournament, and among the client's own candidates."""
    answer_level: AnswerLevel | None = None
    text: str
    thought: str | None = None
    content: str | None = None
    tool_calls: list[CalledFunction] = Field(default_factory=list)
    share: float | None = None
    """The share of its answer in the vote, of all samples; ``None`` without a vote."""
    score: float | None = None
    """The verifier's score."""
    node: str
    logprobs: list[TokenProbability] | None = None


class JobResult(StrictModel):
    """The result of a search. ``answer`` is ``None`` when the chosen solution states none.

    A job that was cancelled has what it had found by then, and none if its search had not begun.
    """

    answer: str | None
    answer_level: AnswerLevel | None = None
    """``strict``: the solution states the answer; ``flexible``: it is its last number or choice letter."""
    text: str | None
    """Chosen solution; without an answer the best one by the verifier, else by the mean log-probability of its tokens.

    If none is finished, the longest partial one.
    """
    thought: str | None = None
    """Thought of this solution, without its delimiters; ``None`` if the model's thoughts are not known."""
    content: str | None = None
    """This solution after its thought and without its calls; ``None`` if it has neither."""
    tool_calls: list[CalledFunction] = Field(default_factory=list)
    """Calls of the client's functions that are the answer."""
    confidence: float | None
    """Share of the answer in a vote, of all samples that have ended; or the verifier's score, or a probability."""
    votes: list[Vote] = Field(default_factory=list)
    abstained: int | None = None
    """Number of samples that have ended without a vote, since they state no answer; ``None`` without a vote."""
    finish_reason: FinishReason
    """``answer``: the chosen solution states one; ``no_answer``: it states none, or no solution was finished, and the
    text is the best one; ``budget``: the search ended because the budget did; ``engine_unavailable``: its engine failed
    for longer than the job waits."""
    note: str | None = None
    """A remark on the choice, such as that the verifier gave no verdict on some solutions."""
    node: str | None
    """Id of the chosen leaf of the search tree."""
    logprobs: list[TokenProbability] | None = None
    """Tokens of this solution after its thought, with the line breaks around it; ``None`` if the job does not ask for
    them, or has used up its budget before they were computed."""
    alternatives: list[Alternative] = Field(default_factory=list)
    """The best solutions of the next answers, as many as the job asks for and the search has found."""
    ranking: list[RankedCandidate] = Field(default_factory=list)
    """The candidates that the client gave, best first."""
    usage_by_model: dict[str, Usage] = Field(default_factory=dict)
    """The bill by model, without the time, of a job with several."""

    @property
    def solutions(self) -> list[JobResult | Alternative]:
        """The chosen solution and its alternatives."""
        return [self, *self.alternatives]


class JobError(StrictModel):
    code: str
    message: str


class Delivery(StrictModel):
    """State of a job's webhook delivery."""

    state: Literal["pending", "delivered", "failed"]
    attempts: int
    error: str | None
    """Error of the last failed attempt."""


class Waiting(StrictModel):
    """The reason for which a job waits: its engine has done nothing for it."""

    reason: str
    """``engine_unavailable``: it cannot be reached, or fails; ``engine_busy``: it has no capacity."""
    detail: str
    """The last failure, in the engine's words if it had any."""
    since: float
    attempts: int
    """Number of attempts in a row that ended so."""


class Job(StrictModel):
    """A job as the API shows it. Times are seconds since the epoch."""

    model_config = ConfigDict(defer_build=True)  # as of ``JobSpec``
    id: str
    status: Status
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    attempt: int = 0
    """Number of workers that have taken the job, without those that handed it back."""
    last_seq: int = 0
    """Sequence number of the newest event."""
    batch: str | None = None
    """Id of the batch whose budget the job shares."""
    spec: JobSpec
    usage: Usage = Field(default_factory=Usage)
    result: JobResult | None = None
    error: JobError | None = None
    waiting: Waiting | None = None
    """Present while the job waits for its engine, until the engine has done something for it."""
    delivery: Delivery | None = None
    """Webhook delivery, for an ended job that has a webhook."""
