"""Claims about the mean of independent random runs, which fail only where the runs contradict them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy import stats

_FALSE_ALARMS = 1e-4
"""Share of tests of a mean that is exactly as claimed which fail."""


def assert_mean_at_least(values: Sequence[float], claim: float) -> None:
    """Assert that the values' expectation may be ``claim`` or more: a one-sided t-test does not contradict it.

    How far the mean of a few runs may be below the claim follows from how much they differ.
    """
    assert _probability(values, claim) > _FALSE_ALARMS, f"mean {statistics.mean(values):.4g}, claimed {claim}: {values}"


def assert_mean_at_most(values: Sequence[float], claim: float) -> None:
    """Assert that the values' expectation may be ``claim`` or less."""
    assert_mean_at_least([-value for value in values], -claim)


def _probability(values: Sequence[float], claim: float) -> float:
    """Return the probability of a mean as low as the values' if it is to be ``claim``."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    excess = statistics.mean(values) - claim
    return float(stats.t.cdf(excess / error, len(values) - 1)) if error else float(excess >= 0)
