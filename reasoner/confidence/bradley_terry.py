"""Strengths of solutions from matches between them, by the Bradley-Terry model.

The probability that i is better than j is the logistic function of the difference of their strengths. Strengths have a
normal prior, so that they exist whatever the matches are; their posterior is approximated by a normal distribution at
its mode (Laplace). A result may be a probability, which counts as that fraction of a win and the rest of a loss.

Source: Bradley and Terry 1952, "Rank Analysis of Incomplete Block Designs: I. The Method of Paired Comparisons".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRIOR_DEVIATION = 1.5
"""Standard deviation of a strength before any match: of two random solutions the better one then wins 4 of 5 times."""
_MAX_ITERATIONS = 100
NUM_SAMPLES = 4000
"""Samples of the posterior behind the probabilities to be the best."""


@dataclass(frozen=True, slots=True)
class Match:
    """The result of a match: the probability that the first of two indices is better."""

    first: int
    second: int
    score: float


@dataclass(frozen=True, slots=True)
class Strengths:
    """Posterior of all strengths, whose mean is about 0."""

    means: NDArray[np.float64]
    covariance: NDArray[np.float64]

    @property
    def errors(self) -> NDArray[np.float64]:
        """Standard deviations of the strengths."""
        return np.sqrt(np.diag(self.covariance))

    def best_probabilities(self) -> NDArray[np.float64]:
        """Return the probability of each to be the strongest, from samples with a fixed seed."""
        root = np.linalg.cholesky(self.covariance)
        noise = np.random.default_rng(0).standard_normal((NUM_SAMPLES, len(self.means)))
        best = (self.means + noise @ root.T).argmax(axis=1)
        return np.bincount(best, minlength=len(self.means)) / NUM_SAMPLES


def fit_strengths(count: int, matches: Sequence[Match]) -> Strengths:
    """Return the strengths of ``count`` solutions, by Newton's method on the concave log-posterior."""
    first = np.array([match.first for match in matches], dtype=np.intp)
    second = np.array([match.second for match in matches], dtype=np.intp)
    scores = np.array([match.score for match in matches], dtype=np.float64)
    prior = 1.0 / PRIOR_DEVIATION**2
    means = np.zeros(count)
    precision = _compute_precision(means, first, second, prior)
    for _ in range(_MAX_ITERATIONS):
        residual = scores - _win_probabilities(means, first, second)
        gradient = -prior * means
        np.add.at(gradient, first, residual)
        np.add.at(gradient, second, -residual)
        step = np.linalg.solve(precision, gradient)
        means = means + step
        precision = _compute_precision(means, first, second, prior)
        if np.abs(step).max() < 1e-10:
            break
    return Strengths(means, np.linalg.inv(precision).astype(np.float64))


def _win_probabilities(
    means: NDArray[np.float64], first: NDArray[np.intp], second: NDArray[np.intp]
) -> NDArray[np.float64]:
    chances: NDArray[np.float64] = 1.0 / (1.0 + np.exp(means[second] - means[first]))
    return chances


def _compute_precision(
    means: NDArray[np.float64], first: NDArray[np.intp], second: NDArray[np.intp], prior: float
) -> NDArray[np.float64]:
    """Return the negative second derivatives of the log-posterior."""
    chances = _win_probabilities(means, first, second)
    weights = chances * (1.0 - chances)
    precision: NDArray[np.float64] = np.eye(len(means)) * prior
    np.add.at(precision, (first, first), weights)
    np.add.at(precision, (second, second), weights)
    np.add.at(precision, (first, second), -weights)
    np.add.at(precision, (second, first), -weights)
    return precision
