"""Thompson sampling: draws from the posteriors that the priors and the scores determine."""

from __future__ import annotations

import math
import random
from statistics import fmean, pvariance

import pytest
from scipy.stats import beta, kstest

from reasoner.confidence.thompson import (
    PRIOR_BETWEEN,
    PRIOR_COUNT,
    PRIOR_MEAN,
    PRIOR_SHAPE,
    PRIOR_VARIANCE,
    PRIOR_WITHIN,
    draw_beta,
    draw_means,
)
from tests.seeds import keep


def test_beta_draws_have_the_posterior_of_fractional_successes() -> None:
    rng, scores = random.Random(keep(1, "a statistical claim")), [1.0, 0.5, 0.25]
    draws = [draw_beta(scores, rng) for _ in range(4000)]
    posterior = beta(PRIOR_COUNT + 1.75, PRIOR_COUNT + 1.25)
    assert kstest(draws, posterior.cdf).pvalue > 1e-4


def test_without_scores_a_new_groups_mean_is_drawn_from_the_prior() -> None:
    rng = random.Random(keep(2, "a statistical claim"))
    draws = [draw_means([[]], rng)[0] for _ in range(4000)]
    reference = [
        rng.gauss(PRIOR_MEAN, math.sqrt(PRIOR_VARIANCE + PRIOR_BETWEEN / rng.gammavariate(PRIOR_SHAPE, 1.0)))
        for _ in range(4000)
    ]
    assert kstest(draws, reference).pvalue > 1e-4


@pytest.mark.long
def test_the_draws_of_the_mixed_model_agree_with_integration_over_its_variances() -> None:
    """The posterior means of two groups, computed in closed form for each pair of variances drawn from the priors."""
    groups = [[0.9, 0.8, 1.0, 0.9], [0.2]]
    rng = random.Random(keep(3, "a statistical claim"))
    drawn = [draw_means(groups, rng) for _ in range(3000)]
    total, sums = 0.0, [0.0, 0.0]
    for _ in range(20000):
        between = PRIOR_BETWEEN / rng.gammavariate(PRIOR_SHAPE, 1.0)
        within = PRIOR_WITHIN / rng.gammavariate(PRIOR_SHAPE, 1.0)
        weight, means = integrate(groups, between, within)
        total += weight
        sums = [old + weight * mean for old, mean in zip(sums, means, strict=True)]
    for group in range(2):
        own = [means[group] for means in drawn]
        error = math.sqrt(pvariance(own) / len(own)) + 0.01  # and that of the integral
        assert abs(fmean(own) - sums[group] / total) < 4 * error


def integrate(groups: list[list[float]], between: float, within: float) -> tuple[float, list[float]]:
    """Return the likelihood of the scores and the groups' posterior means, for given variances.

    The common mean is integrated on a grid; given it, groups are independent and normal.
    """
    step, weights, means = 0.02, [], []
    for at in range(-25, 76):
        common = at * step
        likelihood = normal(common, PRIOR_MEAN, PRIOR_VARIANCE)
        own = []
        for group in groups:
            precision = 1 / between + len(group) / within
            mean = (common / between + math.fsum(group) / within) / precision
            average = fmean(group)
            likelihood *= normal(average, common, between + within / len(group))
            scatter = math.fsum((score - average) ** 2 for score in group)
            likelihood *= within ** (-(len(group) - 1) / 2) * math.exp(-scatter / within / 2)
            own.append(mean)
        weights.append(likelihood)
        means.append(own)
    total = math.fsum(weights)
    weighted = [[weight * mean for mean in own] for weight, own in zip(weights, means, strict=True)]
    return total, [math.fsum(column) / total for column in zip(*weighted, strict=True)]


def normal(x: float, mean: float, variance: float) -> float:
    return math.exp(-((x - mean) ** 2) / variance / 2) / math.sqrt(variance)


def test_a_group_with_many_good_scores_is_drawn_above_a_bad_one_and_a_new_one_stays_uncertain() -> None:
    rng = random.Random(keep(4, "a statistical claim"))
    draws = [draw_means([[0.9] * 20, [0.1] * 20, []], rng) for _ in range(500)]
    assert all(good > bad for good, bad, _ in draws)
    assert pvariance([new for _, _, new in draws]) > 10 * pvariance([good for good, _, _ in draws])
