"""Posterior probability of the leading answer, from the votes alone or with the verifier's scores.

Pure functions of the candidates' answers and scores. A search stops by these probabilities (``JobSpec.confidence``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LOG_ODDS = 6.0
"""Log-odds are clipped to this, which is to probabilities between 0.0025 and 0.9975."""


def leader_probability(weights: Sequence[float], abstained: float = 0.0) -> float:
    """Return the posterior probability that the leading answer would remain the leader under unlimited sampling.

    ``weights`` are the votes of each answer in any order, possibly fractional (a verifier's score). Under a uniform
    prior the leader's share p of the votes of the two largest is Beta(first + 1, second + 1), and the result is
    P(p > 1/2). Without votes it is 0. ``abstained``, the weight of the samples that state no answer, counts as that of
    one rival answer: where most are silent, nobody leads.

    Source: Aggarwal et al. 2023, "Let's Sample Step by Step: Adaptive-Consistency for Efficient Reasoning and Coding
    with LLMs", section 3.2 (the Beta stopping criterion).
    """
    if not weights:
        return 0.0
    first, second = sorted((*weights, 0.0), reverse=True)[:2]
    rival = max(second, abstained)
    above_half = _probability_above_half(max(first, rival), min(first, rival))
    return above_half if first >= rival else 1.0 - above_half


def _probability_above_half(first: float, second: float) -> float:
    """Return P(p > 1/2) of Beta(first + 1, second + 1), where ``first`` is the larger."""
    a, b = first + 1.0, second + 1.0
    # P(p <= 1/2) by the series in NIST's Digital Library of Mathematical Functions, 8.17.8: with a >= b its terms fall.
    term = series = 1.0
    num_terms = 0
    while term > 1e-17 * series:
        term *= (a + b + num_terms) / (2.0 * (a + 1.0 + num_terms))
        series += term
        num_terms += 1
    return 1.0 - series * math.exp(math.lgamma(a + b) - math.lgamma(a + 1.0) - math.lgamma(b) - (a + b) * math.log(2.0))


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
    if probability >= 1.0:
        return MAX_LOG_ODDS
    return max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, math.log(probability / (1.0 - probability))))


def logistic(value: float) -> float:
    """Return 1 / (1 + e^-value)."""
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(value))
