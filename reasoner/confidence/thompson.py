"""Thompson sampling: draws from the posterior of how good a choice is, from the scores that it has given so far.

All scores are from 0 to 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

PRIOR_COUNT = 0.5
"""Both counts of the Beta prior (Jeffreys)."""
PRIOR_MEAN, PRIOR_VARIANCE = 0.5, 0.04
"""Normal prior of the mean of all choices."""
PRIOR_SHAPE, PRIOR_BETWEEN, PRIOR_WITHIN = 2.0, 0.04, 0.09
"""Inverse gamma priors of the variance between choices and of the scores of one."""
SWEEPS = 50
"""Gibbs sweeps of one draw; the chain is short and starts at the data's own means."""


def draw_beta(scores: Sequence[float], rng: random.Random) -> float:
    """Draw the mean of scores that count as fractions of successes."""
    right = math.fsum(scores)
    return rng.betavariate(PRIOR_COUNT + right, PRIOR_COUNT + len(scores) - right)


def draw_means(groups: Sequence[Sequence[float]], rng: random.Random) -> list[float]:
    """Draw the mean of each group, in a mixed model of groups that share what they learn.

    A score is its group's mean with normal noise, and the means are normal around a common one. So an empty group's
    mean is drawn from what the others have shown.
    """
    known = [score for group in groups for score in group]
    common = math.fsum(known) / len(known) if known else PRIOR_MEAN
    means = [math.fsum(group) / len(group) if group else common for group in groups]
    between, within = PRIOR_BETWEEN, PRIOR_WITHIN
    for _ in range(SWEEPS):
        means = [
            _draw_normal(common / between + math.fsum(group) / within, 1 / between + len(group) / within, rng)
            for group in groups
        ]
        precision = 1 / PRIOR_VARIANCE + len(groups) / between
        common = _draw_normal(PRIOR_MEAN / PRIOR_VARIANCE + math.fsum(means) / between, precision, rng)
        spread = math.fsum((mean - common) ** 2 for mean in means)
        between = _draw_inverse_gamma(PRIOR_SHAPE + len(groups) / 2, PRIOR_BETWEEN + spread / 2, rng)
        noise = math.fsum((score - mean) ** 2 for group, mean in zip(groups, means, strict=True) for score in group)
        within = _draw_inverse_gamma(PRIOR_SHAPE + len(known) / 2, PRIOR_WITHIN + noise / 2, rng)
    return means


def _draw_normal(weighted_mean: float, precision: float, rng: random.Random) -> float:
    """Draw from the normal distribution with this precision and ``weighted_mean / precision`` as its mean."""
    return rng.gauss(weighted_mean / precision, 1 / math.sqrt(precision))


def _draw_inverse_gamma(shape: float, scale: float, rng: random.Random) -> float:
    return scale / rng.gammavariate(shape, 1.0)
