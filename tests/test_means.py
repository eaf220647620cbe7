"""Claims about means: tested by the spread of the runs."""

from __future__ import annotations

import random

import pytest

from tests.means import assert_mean_at_least, assert_mean_at_most
from tests.seeds import shift


def test_a_mean_that_is_as_claimed_hardly_ever_fails() -> None:
    """More than three of 300 fail in one run of ten millions."""
    rng, failures = random.Random(shift(0)), 0
    for _ in range(300):
        try:
            assert_mean_at_least([rng.gauss(1.0, 0.1) for _ in range(6)], 1.0)
        except AssertionError:
            failures += 1
    assert failures <= 3


def test_a_mean_far_below_the_claim_is_rejected() -> None:
    rng = random.Random(shift(0))
    for _ in range(200):
        values = [rng.gauss(1.0, 0.01) for _ in range(6)]
        with pytest.raises(AssertionError, match=r"claimed 1\.2"):
            assert_mean_at_least(values, 1.2)
        with pytest.raises(AssertionError, match="claimed"):
            assert_mean_at_most(values, 0.8)


def test_equal_values_are_compared_with_the_claim() -> None:
    assert_mean_at_least([0.5] * 4, 0.5)
    assert_mean_at_most([0.5] * 4, 0.5)
    with pytest.raises(AssertionError, match="claimed"):
        assert_mean_at_least([0.5] * 4, 0.6)
