"""Stopping rules of a vote: decisions by hand, the same samples as sequentially in any arrival order, none wasted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from reasoner.confidence.stopping_rules import ReceivedAnswers, num_needed_by_beta, num_needed_by_window
from tests.seeds import shift

Rule = Callable[[ReceivedAnswers, int], int]
ANSWERS = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, None]), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("answers", "needed"),
    [
        ([], 4),  # 15/16 after three equal answers, 31/32 after four
        ([0, 0, 0], 4),
        ([0, 0, 0, 0], 4),
        ([0, 0, 0, 1], 7),  # 5:1 is 120/128 = 0.94, 6:1 is 247/256 = 0.965
        ([0, 0, 0, 0, None], 7),  # who is silent counts as a rival
        ([None, None], 10),  # 8:2 is 0.967
        ([None] * 6 + [0] * 4, 12),  # two more, and nothing can change the winner
        ([0, 1] * 7, 16),
        ([0, 1] * 8, 16),
    ],
)
def test_beta_requests_the_fewest_samples_that_can_reach_its_threshold(answers: list[int | None], needed: int) -> None:
    assert num_needed_by_beta(dict(enumerate(answers)), 16, 0.95) == needed


def test_a_threshold_of_one_stops_only_when_the_winner_cannot_change() -> None:
    assert num_needed_by_beta({}, 16, 1.0) == 9
    assert num_needed_by_beta(dict(enumerate([0] * 8)), 16, 1.0) == 9  # eight more could tie
    assert num_needed_by_beta(dict(enumerate([0] * 9)), 16, 1.0) == 9
    assert num_needed_by_beta(dict(enumerate([0] * 8 + [1])), 16, 1.0) == 10


@pytest.mark.parametrize(
    ("answers", "needed"),
    [
        ({}, 4),
        ({0: 5, 1: 5, 2: 5}, 4),
        ({0: 5, 1: 5, 2: 5, 3: 5}, 4),
        ({2: 5, 3: 6}, 8),  # the second window starts as soon as the first can no longer agree
        ({3: None}, 8),
        ({5: 1, 6: 1}, 6),  # started ahead: all of the first window are still needed
        ({0: 1, 1: 2, 4: 1, 5: 1, 6: 1, 7: 1}, 8),
        ({0: 1, 1: 2, 4: 1, 5: 2}, 10),
    ],
)
def test_windows_are_requested_in_order_until_one_agrees(answers: ReceivedAnswers, needed: int) -> None:
    assert num_needed_by_window(answers, 10, 4) == needed


def test_a_window_of_at_least_n_samples_ends_only_after_all_of_them() -> None:
    assert num_needed_by_window({}, 4, 4) == 4
    assert num_needed_by_window({}, 3, 4) == 3


@pytest.mark.parametrize("threshold", [0.8, 0.95, 1.0])
@given(answers=ANSWERS, seed=st.integers(0, 1000))
def test_beta_uses_the_sequential_samples_in_any_order_and_wastes_none(
    threshold: float, answers: list[int | None], seed: int
) -> None:
    n = len(answers)

    def enough(prefix: Sequence[int | None]) -> bool:
        counts = sorted((prefix.count(answer) for answer in {*prefix} - {None}), reverse=True)
        first, second = (*counts, 0, 0)[:2]
        is_sure = beta(first + 1, max(second, prefix.count(None)) + 1).sf(0.5) >= threshold
        return is_sure or first - second > n - len(prefix)

    alone = next((size for size in range(n) if enough(answers[:size])), n)
    assert hear(lambda heard, n: num_needed_by_beta(heard, n, threshold), answers, seed) == alone


@given(answers=ANSWERS, seed=st.integers(0, 1000), window=st.integers(1, 8))
def test_windows_use_the_sequential_samples_in_any_order(answers: list[int | None], seed: int, window: int) -> None:
    n = len(answers)
    windows = [answers[start : start + window] for start in range(0, n, window)]
    agreed = [index for index, part in enumerate(windows) if len({*part}) == 1 and None not in part]
    alone = min(n, window * (agreed[0] + 1)) if agreed else n
    assert hear(lambda heard, n: num_needed_by_window(heard, n, window), answers, seed) == alone


def hear(rule: Rule, answers: Sequence[int | None], seed: int) -> int:
    """Start the samples that the rule certainly needs, deliver them in random order, and return the number started."""
    rng, heard, started = random.Random(shift(seed)), dict[int, int | None](), 0
    while (needed := rule(heard, len(answers))) > len(heard):
        assert needed >= started, "a sample was started that the rule no longer needs"
        started = needed
        number = rng.choice([number for number in range(started) if number not in heard])
        heard[number] = answers[number]
    assert len(heard) == started
    return started
