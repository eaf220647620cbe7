"""Strengths agree with the model's own definition, and schedules have as many matches as they promise."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from reasoner.confidence.bradley_terry import NUM_SAMPLES, PRIOR_DEVIATION, Match, fit_strengths
from reasoner.jobs.request import ScheduleName
from reasoner.strategies.merging.schedules import SCHEDULES, max_matches
from tests.seeds import shift


def test_two_players_have_the_mode_of_the_posterior_on_a_grid() -> None:
    matches = [Match(0, 1, 1.0)] * 3 + [Match(1, 0, 1.0)]
    difference = np.linspace(-20, 20, 200_001)
    prior = -(difference**2) / (4 * PRIOR_DEVIATION**2)  # the difference of two strengths has twice the variance
    log_density = prior - 3 * np.log1p(np.exp(-difference)) - np.log1p(np.exp(difference))
    strengths = fit_strengths(2, matches)
    spacing = difference[1] - difference[0]
    assert strengths.means[0] - strengths.means[1] == pytest.approx(difference[log_density.argmax()], abs=spacing)


def test_strengths_are_the_stationary_point_of_the_posterior() -> None:
    rng = random.Random(shift(1))
    matches = [Match(*rng.sample(range(6), 2), rng.random()) for _ in range(30)]
    means = fit_strengths(6, matches).means
    gradient = -means / PRIOR_DEVIATION**2
    for match in matches:
        surplus = match.score - 1 / (1 + math.exp(means[match.second] - means[match.first]))
        gradient[match.first] += surplus
        gradient[match.second] -= surplus
    # The last step is below 1e-10, and a gradient is at most the curvature (the prior's and 1/4 a match) times that.
    assert np.abs(gradient).max() < 1e-10 * (1 / PRIOR_DEVIATION**2 + len(matches) / 2)


def test_without_matches_all_are_equally_likely_the_best() -> None:
    error = math.sqrt(0.25 * 0.75 / NUM_SAMPLES)
    assert np.abs(fit_strengths(4, []).best_probabilities() - 0.25).max() < 5 * error


@pytest.mark.parametrize("count", range(2, 40))
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_has_at_most_the_promised_matches_and_repeats_none(name: ScheduleName, count: int) -> None:
    rng = random.Random(shift(count))
    rounds, results, met = SCHEDULES[name](count, rng), None, []
    while True:
        try:
            pairs = next(rounds) if results is None else rounds.send(results)
        except StopIteration:
            break
        met += [frozenset(pair) for pair in pairs]
        results = [rng.random() for _ in pairs]
    assert len(met) == len(set(met)) <= max_matches(name, count)
    assert max_matches(name, count) <= count * math.ceil(math.log2(count))
    assert name != "knockout" or len(met) == count - 1
    assert {index for pair in met for index in pair} == set(range(count)) or name == "swiss"
