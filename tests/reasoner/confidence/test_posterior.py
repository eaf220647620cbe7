"""Posteriors against closed forms, SciPy and a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from reasoner.confidence.posterior import leader_probability
from tests.seeds import keep


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (4, 0), (3, 2), (16, 15), (200, 3), (256, 256)])
def test_integer_votes_have_the_closed_form_of_coin_tosses(first: int, second: int) -> None:
    # P(Beta(a, b) > 1/2) is the probability of fewer than a heads in a + b - 1 tosses of a fair coin.
    tosses = first + second + 1
    exact = sum(math.comb(tosses, heads) for heads in range(first + 1)) / 2**tosses
    assert leader_probability([second, first]) == pytest.approx(exact, abs=1e-12)


@given(first=st.floats(0, 300), second=st.floats(0, 300))
def test_fractional_votes_have_scipys_beta_distribution(first: float, second: float) -> None:
    expected = stats.beta.sf(0.5, max(first, second) + 1, min(first, second) + 1)
    assert leader_probability([first, second]) == pytest.approx(expected, abs=1e-11)


def test_the_posterior_is_the_leaders_frequency_in_a_simulation_given_the_votes() -> None:
    """Simulate prior and votes: shares are uniform, then seven votes are sampled; worlds with five to two are kept."""
    rng = np.random.default_rng(keep(0, "a statistical claim"))
    shares = rng.random(400_000)
    kept = shares[rng.binomial(7, shares) == 5]
    ahead = int((kept > 0.5).sum())
    assert stats.binomtest(ahead, len(kept), leader_probability([2.0, 5.0, 1.0])).pvalue > 0.01


def test_without_votes_nothing_leads_and_a_tie_is_one_half() -> None:
    assert leader_probability([]) == 0.0
    assert leader_probability([3.0, 3.0]) == pytest.approx(0.5)
    assert leader_probability([0.9]) < leader_probability([1.0]) < leader_probability([1.0, 0.0, 0.0, 0.0]) + 1e-12
