"""Which solutions of a job are right: by the verifier's scores, or by the answer that the search has chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from reasoner.answers.canonical import canonicalize
from reasoner.answers.plain import differs_plainly
from reasoner.jobs.view import NodeView
from reasoner.training_data.recorded_job import RecordedJob

By = Literal["score", "answer"]

RIGHT_SCORE = 0.5
"""Score from which on a solution, or a step of one, counts as right."""
_CUT_BY_LENGTH = ("length", "context", "repetition", "tool")
"""Ends of branches that have used up what one solution may have, and so have no answer."""

Reward = Callable[[NodeView], float | None]
"""Function that returns a solution's reward from 0 to 1; ``None`` if nothing tells it."""


def choose_reward(job: RecordedJob, by: By | None) -> Reward:
    """Return the reward of a job's solutions: by default by scores, if a branch of the job has one, else by answers."""
    if by is None:
        by = "score" if any(node.score is not None for node in job.view.nodes.values()) else "answer"
    return _get_score if by == "score" else _AnswerReward(job)


def is_right(reward: float) -> bool:
    return reward >= RIGHT_SCORE


def _get_score(node: NodeView) -> float | None:
    return node.score


class _AnswerReward:
    """1 for a solution that states the job's answer, 0 for one that states another or none.

    Answers that may be equal by algebra alone are left undecided.
    """

    def __init__(self, job: RecordedJob) -> None:
        self._compare = job.spec.answer.compare
        answer: str | None = job.result.get("answer")
        self._right = None if answer is None else canonicalize(answer, self._compare)

    def __call__(self, node: NodeView) -> float | None:
        if self._right is None:
            return None
        if node.answer is None:
            return 0.0 if node.end_reason in ("answer", "stop", *_CUT_BY_LENGTH) else None
        stated = canonicalize(node.answer, self._compare)
        if stated == self._right:
            return 1.0
        return 0.0 if self._compare != "math" or differs_plainly(stated, self._right) else None
