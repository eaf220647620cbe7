"""Allocation of a token budget that several jobs share.

Each job first gets the same initial grant. A job that has used up its grants requests one more slice, with the expected
gain in its probability of a correct answer. The request with the largest gain per token is granted, repeatedly, until
the pool is empty. For diminishing gains this greedy rule solves the knapsack of all slices (Fox 1966, "Discrete
Optimization Via Marginal Analysis"; for language models Damani et al. 2024, "Learning How Hard to Think", section 3).
A request depends on the job's own samples alone, so that the allocation is a priority queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

INITIAL_SHARE = 0.25
"""Initial grant of each job, as a fraction of an equal share of the budget."""
MAX_ACTIVE_JOBS = 16
"""Maximum number of jobs that spend a further slice at the same time.

More of them use the engine better; with fewer, more requests are compared before tokens are spent.
"""

MAX_TRUST = 0.8
"""Upper bound of the probability that a single model verdict is right."""

RULE_KINDS = frozenset({"exact", "numeric", "math", "regex", "json_schema", "python"})
"""Kinds of verifiers with conclusive verdicts, to which ``MAX_TRUST`` does not apply."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of a job: for each finished solution its canonical answer and score (if any), and the tokens spent."""

    samples: Sequence[tuple[str | None, float | None]]
    spent: int
    trust: float = MAX_TRUST

    def next_request(self) -> TokenRequest:
        """Return a request for about one more solution."""
        tokens_per_sample = math.ceil(self.spent / max(1, len(self.samples)))
        return TokenRequest(max(1, tokens_per_sample), expected_gain(self.samples, self.trust))


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Request for a slice of the budget, with the expected gain in the probability of a correct answer."""

    tokens: int
    gain: float

    @property
    def rate(self) -> float:
        """Gain per token, by which requests are ordered."""
        return self.gain / self.tokens


def expected_gain(samples: Sequence[tuple[str | None, float | None]], trust: float) -> float:
    """Return the expected gain in the probability of a correct answer from one more solution.

    It is the probability that the leading answer is wrong times the probability that a new solution is then right.
    Solutions that agree count as independent evidence, each weighted by its score up to ``trust``, or 1/2 without a
    score. The probability for a new solution is the posterior mean of the scores outside of the leading class under a
    uniform prior: it starts at 1/2 and falls with each solution of low score, so that unsolvable problems do not use up
    the budget. With one leader this is the expected improvement of Bayesian optimisation (Jones et al. 1998).
    """
    odds: dict[str, float] = {}
    prob_wrong: dict[str, float] = {}
    for answer, score in samples:
        if answer is not None:
            prob_wrong[answer] = prob_wrong.get(answer, 1.0) * (1.0 - min(trust, 0.5 if score is None else score))
    for answer, wrong in prob_wrong.items():
        if wrong <= 0.0:
            return 0.0  # a conclusive verdict: nothing to gain
        odds[answer] = 1.0 / wrong - 1.0
    leader = max(odds, key=lambda answer: odds[answer], default=None)
    prob_leader = 0.0 if leader is None else odds[leader] / (1.0 + sum(odds.values()))
    other_scores = [
        0.5 if score is None else score for answer, score in samples if answer is not None and answer != leader
    ]
    num_others = sum(1 for answer, _ in samples if answer is None or answer != leader)
    return (1.0 - prob_leader) * (sum(other_scores) + 1.0) / (num_others + 2.0)


def initial_grant(budget: int, num_jobs: int) -> int:
    """Return the initial grant of each job in tokens, at least 1."""
    return max(1, int(INITIAL_SHARE * budget) // num_jobs)


class TokenPool:
    """The allocation in one process. The store implements the same rule for batches (``workers/store/lua``).

    ``request`` and ``end`` return the grants that they trigger: tokens by job, 0 for a job that gets no more.
    """

    def __init__(self, budget: int, jobs: Sequence[str], max_active: int = MAX_ACTIVE_JOBS) -> None:
        """Raises ``ValueError`` for less than one token per job."""
        if budget < len(jobs):
            raise ValueError(f"{budget} tokens are too few for {len(jobs)} jobs: give at least one token per job")
        self.granted = dict.fromkeys(jobs, initial_grant(budget, len(jobs)))
        self.unassigned = budget - sum(self.granted.values())
        self._max_active = max_active
        self._in_initial_grant = set(jobs)
        self._active: set[str] = set()
        self._waiting: dict[str, TokenRequest] = {}

    def request(self, job: str, request: TokenRequest) -> dict[str, int]:
        """Queue the request of a job that has used up its grants."""
        self._remove(job)
        self._waiting[job] = request
        return self._distribute()

    def end(self, job: str, spent: int) -> dict[str, int]:
        """Return the unspent tokens of an ended job to the pool."""
        self._remove(job)
        self.unassigned += self.granted[job] - spent
        return self._distribute()

    def _remove(self, job: str) -> None:
        self._in_initial_grant.discard(job)
        self._active.discard(job)
        self._waiting.pop(job, None)

    def _distribute(self) -> dict[str, int]:
        grants: dict[str, int] = {}
        while self._waiting and not self._in_initial_grant and len(self._active) < self._max_active:
            job, request = max(self._waiting.items(), key=lambda item: (item[1].rate, item[0]))
            if request.gain > 0 and self.unassigned == 0 and self._active:
                break  # active jobs may return tokens that reach this request
            tokens = min(request.tokens, self.unassigned) if request.gain > 0 else 0
            if tokens > 0:
                self._active.add(job)
                self.unassigned -= tokens
                self.granted[job] += tokens
            del self._waiting[job]
            grants[job] = tokens
        return grants
