"""Allocation of a token budget that several jobs share.

Each job first gets the same initial grant. A job that has used up its grants requests one more slice, with the expected
gain in its probability of a correct answer. The request with the largest gain per token is granted, repeatedly, until
the pool is empty. For diminishing gains this greedy rule solves the knapsack of all slices (Fox 1966, "Discrete
Optimization Via Marginal Analysis"; for language models Damani et al. 2024, "Learning How Hard to Think", section 3).
A request depends on the job's own samples alone, so that the allocation is a priority queue
(``workers/store/lua/common.lua``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

INITIAL_SHARE = 0.25
"""Initial grant of each job, as a fraction of an equal share of the budget."""
MAX_ACTIVE_JOBS = 16
"""Maximum number of jobs that spend a further slice at the same time.

More of them use the engine better; with fewer, more requests are compared before tokens are spent.
"""

MAX_TRUST = 0.8
"""Upper bound of the probability that a single verdict is right, unless it is conclusive."""


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


class Prospect(NamedTuple):
    """The prospects of one more solution."""

    wrong: float
    """Probability that the leading answer is wrong."""
    chance: float
    """Probability that a new solution is right then."""


def expected_gain(samples: Sequence[tuple[str | None, float | None]], trust: float) -> float:
    """Return the expected gain in the probability of a correct answer from one more solution."""
    wrong, chance = estimate_prospect(samples, trust)
    return wrong * chance


def estimate_prospect(samples: Sequence[tuple[str | None, float | None]], trust: float) -> Prospect:
    """Return the two factors of the expected gain in the probability of a correct answer from one more solution.

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
            return Prospect(0.0, 0.0)  # a conclusive verdict: nothing to gain
        odds[answer] = 1.0 / wrong - 1.0
    leader = max(odds, key=lambda answer: odds[answer], default=None)
    prob_leader = 0.0 if leader is None else odds[leader] / (1.0 + sum(odds.values()))
    other_scores = [
        0.5 if score is None else score for answer, score in samples if answer is not None and answer != leader
    ]
    num_others = sum(1 for answer, _ in samples if answer is None or answer != leader)
    return Prospect(1.0 - prob_leader, (sum(other_scores) + 1.0) / (num_others + 2.0))


def initial_grant(budget: int, num_jobs: int) -> int:
    """Return the initial grant of each job in tokens, at least 1."""
    return max(1, int(INITIAL_SHARE * budget) // num_jobs)
