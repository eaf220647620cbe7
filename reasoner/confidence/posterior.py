"""Posterior probability of the leading answer, from the votes alone or with the verifier's scores.

Pure functions of the candidates' answers and scores. A search stops by these probabilities (``JobSpec.confidence``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LOG_ODDS = 6.0
"""Log-odds are clipped to this, which is to probabilities between 0.0025 and 0.9975."""
TINY = 1e-300
"""Replacement of a zero denominator in the continued fraction."""


def leader_probability(weights: Sequence[float]) -> float:
    """Return the posterior probability that the leading answer would remain the leader under unlimited sampling.

    ``weights`` are the votes of each answer in any order, possibly fractional (a verifier's score). Under a uniform
    prior the leader's share p of the votes of the two largest is Beta(first + 1, second + 1), and the result is
    P(p > 1/2). Without votes it is 0.

    Source: Aggarwal et al. 2023, "Let's Sample Step by Step: Adaptive-Consistency for Efficient Reasoning and Coding
    with LLMs", section 3.2 (the Beta stopping criterion).
    """
    if not weights:
        return 0.0
    first, second = sorted((*weights, 0.0), reverse=True)[:2]
    return 1.0 - beta_cdf(0.5, first + 1.0, second + 1.0)


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return P(X <= x) for X distributed as Beta(a, b), with 0 <= x <= 1 and a and b positive.

    This is the regularised incomplete beta function by its continued fraction, accurate to about 1e-14.
    Source: NIST Digital Library of Mathematical Functions, 8.17.4 and 8.17.22, evaluated by Lentz's method.
    """
    if not (0.0 <= x <= 1.0 and a > 0.0 and b > 0.0):
        raise ValueError(f"Beta({a}, {b}) at {x}: x must lie in [0, 1], and a and b must be positive")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges quickly on the other side
        return 1.0 - beta_cdf(1.0 - x, b, a)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1000):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / (1.0 + term * d or TINY)
        c = 1.0 + term / c or TINY
        value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return scale * (value - 1.0) / a


@dataclass(frozen=True, slots=True)
class Evidence:
    """Number of candidates that state an answer, and the best verifier score among them (``None`` without any)."""

    votes: int
    score: float | None


FEATURES = ("constant", "score", "rival_score", "votes", "rival_votes")


def compute_features(answers: Sequence[Evidence], index: int) -> tuple[float, ...]:
    """Return the features of ``answers[index]`` from which its probability is predicted, in the order of ``FEATURES``.

    Scores are log-odds, of this answer and of the best other one. Votes are logarithms, of this answer's count and of
    one plus the largest other count, which is weighted by that answer's score. An answer without a score has the
    lowest log-odds and weight 1.
    """
    own = answers[index]
    rivals = [rival for rival_index, rival in enumerate(answers) if rival_index != index]
    return (
        1.0,
        log_odds(own.score),
        max((log_odds(rival.score) for rival in rivals), default=-MAX_LOG_ODDS),
        math.log(own.votes),
        math.log1p(max((rival.votes * (1.0 if rival.score is None else rival.score) for rival in rivals), default=0)),
    )


def log_odds(probability: float | None) -> float:
    """Return log(p / (1 - p)), clipped to ``MAX_LOG_ODDS`` on both sides; the lowest for ``None``."""
    if not probability:
        return -MAX_LOG_ODDS
    return (
        MAX_LOG_ODDS
        if probability >= 1.0
        else max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, math.log(probability / (1.0 - probability))))
    )


def logistic(value: float) -> float:
    """Return 1 / (1 + e^-value)."""
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(value))
