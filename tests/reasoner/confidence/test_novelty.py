"""The gain that another sample promises, against simulated sampling."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from reasoner.confidence.novelty import compute_gain, compute_novelty
from tests.seeds import shift


def test_samples_that_agree_make_new_answers_unlikely_and_one_of_each_makes_them_likely() -> None:
    assert compute_novelty([2]) == 1 / 4
    assert compute_novelty([14]) == 1 / 16
    assert compute_novelty([1, 1, 1, 1]) == 5 / 6
    assert compute_novelty([2, 2], silent=4) == 1 / 10
    assert compute_novelty([]) == 1 / 2


@pytest.mark.parametrize("seed", range(20))
def test_the_estimate_is_right_on_average(seed: int) -> None:
    """Over many draws its mean is that of the true probability of a new answer, up to the two samples that it adds."""
    rng = random.Random(shift(seed))
    weights = [rng.random() ** 3 for _ in range(12)]
    total, count, size = sum(weights), 800, 16
    estimates = truths = 0.0
    for _ in range(count):
        seen = Counter(rng.choices(range(12), weights, k=size))
        estimates += compute_novelty(list(seen.values())) / count
        truths += sum(weight for answer, weight in enumerate(weights) if answer not in seen) / total / count
    assert truths <= estimates + 0.02  # Good's estimate is for one sample less, so not below the truth
    assert abs(estimates - truths) < 0.08


def test_nothing_is_gained_where_the_best_answer_is_right() -> None:
    assert compute_gain(1.0, [1, 1, 1]) == 0.0
    assert compute_gain(0.4, [2]) == pytest.approx(0.6 / 4)
