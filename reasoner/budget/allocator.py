"""Who gets the next tokens of a budget that several jobs share.

Every job first gets the same floor. A job that has used up what it was granted asks for one more slice and says what it
expects of it: the gain in its chance of being right. The pool goes to the job that promises the largest gain per token,
again and again, until it is empty: for gains that diminish this solves the knapsack of all slices (Fox 1966, "Discrete
Optimization Via Marginal Analysis"; for language models Damani et al. 2024, "Learning How Hard to Think", section 3).
A job asks for itself, of nothing but its own samples, so the whole decision is a queue by priority.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

INITIAL_SHARE = 0.25
"""Of an even share: what every job gets, however little it promises."""
MAX_ACTIVE_JOBS = 16
"""Jobs that spend a slice beyond their floor at once: more keep the engine busier, fewer compare more before a token is
spent."""


MAX_TRUST = 0.8
"""The most that one verdict of a model is believed; two that agree are believed more."""

RULE_KINDS = frozenset({"exact", "numeric", "math", "regex", "json_schema", "python"})
"""Kinds of verifiers that know: their verdicts are believed."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """What a job knows: the answers of its finished solutions in a form in which equal ones are equal, each with the
    verifier's score if it has one, and the tokens that it took."""

    samples: Sequence[tuple[str | None, float | None]]
    spent: int
    trust: float = MAX_TRUST

    def next_request(self) -> TokenRequest:
        """What the job asks for next: about one more solution."""
        each = math.ceil(self.spent / max(1, len(self.samples)))
        return TokenRequest(max(1, each), expected_gain(self.samples, self.trust))


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A slice that a job asks for, and the gain in its chance of a right answer that it expects of it."""

    tokens: int
    gain: float

    @property
    def rate(self) -> float:
        """Gain per token: what asks are compared by."""
        return self.gain / self.tokens


def expected_gain(samples: Sequence[tuple[str | None, float | None]], trust: float) -> float:
    """The gain in the chance of a right answer that one more solution promises: that the answer which leads now is
    wrong, times that a new one is right although it is.

    Solutions that agree are taken for independent evidence, each believed by its score, up to ``trust``; one without a
    score by half. The chance of a new one is the posterior mean of the scores outside of the leading class, from a
    uniform prior: it starts at 1/2 and falls with every solution that did not convince, so that hopeless problems do
    not eat the budget. For one leader this is the expected improvement of Bayesian optimisation (Jones et al. 1998).
    """
    odds: dict[str, float] = {}
    doubt: dict[str, float] = {}
    for answer, score in samples:
        if answer is not None:
            doubt[answer] = doubt.get(answer, 1.0) * (1.0 - min(trust, 0.5 if score is None else score))
    for answer, wrong in doubt.items():
        if wrong <= 0.0:
            return 0.0  # somebody knows
        odds[answer] = 1.0 / wrong - 1.0
    leader = max(odds, key=lambda answer: odds[answer], default=None)
    right = 0.0 if leader is None else odds[leader] / (1.0 + sum(odds.values()))
    others = [0.5 if score is None else score for answer, score in samples if answer is not None and answer != leader]
    rivals = sum(1 for answer, _ in samples if answer is None or answer != leader)
    return (1.0 - right) * (sum(others) + 1.0) / (rivals + 2.0)


def initial_grant(budget: int, jobs: int) -> int:
    """The tokens that each of the jobs is granted at the start, at least one; a budget has one for each."""
    return max(1, int(INITIAL_SHARE * budget) // jobs)


class TokenPool:
    """The rule in one process; a batch of the service follows the same one in its store (``workers/store/lua``).

    Both methods answer what is decided now: tokens for jobs that asked, 0 for one that gets no more.
    """

    def __init__(self, budget: int, jobs: Sequence[str], width: int = MAX_ACTIVE_JOBS) -> None:
        """Raises ``ValueError`` for less than a token for each job."""
        if budget < len(jobs):
            raise ValueError(f"{budget} tokens are less than one for each of {len(jobs)} jobs")
        self.granted = dict.fromkeys(jobs, initial_grant(budget, len(jobs)))
        self.unassigned = budget - sum(self.granted.values())
        self._width = width
        self._floors = set(jobs)
        self._active: set[str] = set()
        self._waiting: dict[str, TokenRequest] = {}

    def request(self, job: str, request: TokenRequest) -> dict[str, int]:
        """A job has used up what it was granted and would go on."""
        self._leave(job)
        self._waiting[job] = request
        return self._deal()

    def end(self, job: str, spent: int) -> dict[str, int]:
        """A job has ended; what it leaves is shared again."""
        self._leave(job)
        self.unassigned += self.granted[job] - spent
        return self._deal()

    def _leave(self, job: str) -> None:
        self._floors.discard(job)
        self._active.discard(job)
        self._waiting.pop(job, None)

    def _deal(self) -> dict[str, int]:
        dealt: dict[str, int] = {}
        while self._waiting and not self._floors and len(self._active) < self._width:
            job, ask = max(self._waiting.items(), key=lambda item: (item[1].rate, item[0]))
            if ask.gain > 0 and self.unassigned == 0 and self._active:
                break  # what the active ones leave may still reach it
            tokens = min(ask.tokens, self.unassigned) if ask.gain > 0 else 0
            if tokens > 0:
                self._active.add(job)
                self.unassigned -= tokens
                self.granted[job] += tokens
            del self._waiting[job]
            dealt[job] = tokens
        return dealt
