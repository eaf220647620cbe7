"""Token confidences by hand and against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import TokenLogprob
from reasoner.confidence.token_confidence import (
    MAX_TOKEN_CONFIDENCE,
    MEASURES,
    bottom_confidence,
    compute_token_confidence,
    confidence_threshold,
    group_confidences,
    lowest_confidence,
    mean_confidence,
    tail_confidence,
)

VALUES = st.lists(st.floats(0, 30).map(lambda value: round(value, 3)), min_size=1, max_size=60)


def test_a_tokens_confidence_is_the_negative_mean_logprob_of_the_top_tokens() -> None:
    top = tuple((token, math.log(share)) for token, share in enumerate((0.9, 0.09, 0.009)))
    assert compute_token_confidence(TokenLogprob(5, -9.0, top)) == round(-math.log(0.9 * 0.09 * 0.009) / 3, 3)
    even = tuple((token, math.log(0.25)) for token in range(4))
    assert compute_token_confidence(TokenLogprob(0, 0.0, even)) < compute_token_confidence(TokenLogprob(0, 0.0, top))


def test_impossible_alternatives_give_a_finite_confidence() -> None:
    assert compute_token_confidence(TokenLogprob(0, 0.0, ((0, 0.0), (1, -math.inf)))) == MAX_TOKEN_CONFIDENCE


def test_an_engine_without_top_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="did not report"):
        compute_token_confidence(TokenLogprob(0, -1.0))


def test_confidence_measures_of_a_solution_by_hand() -> None:
    confidences = [4.0, 2.0, 0.0, 4.0, 8.0]
    assert group_confidences(confidences, 2) == [3.0, 1.0, 2.0, 6.0]
    assert lowest_confidence(confidences, 2) == 1.0
    assert tail_confidence(confidences, 2) == 6.0
    assert mean_confidence(confidences, 2) == 3.6
    assert bottom_confidence(confidences, 2) == 1.0
    assert (
        bottom_confidence([float(value) for value in range(30)], 1) == 1.0
    )  # 0, 1 and 2 are the lowest three of thirty
    assert group_confidences(confidences, 9) == [3.6]
    assert [measure(confidences, 9) for measure in MEASURES.values()] == [3.6] * 4


@given(values=VALUES, window=st.integers(1, 80))
def test_group_confidences_are_the_means_of_all_windows(values: list[float], window: int) -> None:
    size = min(window, len(values))
    expected = np.lib.stride_tricks.sliding_window_view(np.array(values), size).mean(axis=1)
    assert group_confidences(values, window) == pytest.approx(expected.tolist(), abs=1e-9)


@given(values=VALUES, window=st.integers(1, 80), new=st.integers(1, 60))
def test_windows_that_end_in_the_newest_tokens_read_only_the_end_of_the_text(
    values: list[float], window: int, new: int
) -> None:
    whole, end = group_confidences(values, window), group_confidences(values[-(window - 1 + new) :], window)
    assert end == pytest.approx(whole[-len(end) :], abs=1e-9)


@given(values=VALUES, percent=st.floats(0, 100))
def test_the_threshold_is_numpys_percentile_and_is_always_reached(values: list[float], percent: float) -> None:
    assert confidence_threshold(values, percent) == pytest.approx(np.percentile(values, 100 - percent), abs=1e-9)
    assert max(values) >= confidence_threshold(values, percent)


def test_the_top_tenth_and_the_top_nine_tenths_of_ten_solutions() -> None:
    values = [float(value) for value in range(1, 12)]
    assert confidence_threshold(values, 10) == 10.0
    assert confidence_threshold(values, 90) == 2.0
    assert sum(value >= confidence_threshold(values, 10) for value in values) == 2
