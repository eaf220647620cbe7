"""Confidence of tokens, and of a solution by its least confident groups of tokens.

Source: Fu et al. 2025, "Deep Think with Confidence", sections 2 and 3.1. The confidence of a token is minus the mean
log-probability of the k most likely tokens at its position: high if one token has nearly all of the probability. A
group is a window of consecutive tokens, and its confidence is the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np

from engine.protocol.types import TokenLogprob

MAX_TOKEN_CONFIDENCE = 100.0
"""Upper bound of a token's confidence, since numbers in a journal must be finite."""

ConfidenceMeasure = Literal["bottom", "tail", "lowest", "mean"]


def compute_token_confidence(token: TokenLogprob) -> float:
    """Return the confidence of one token in nats, rounded to the three decimals that a journal keeps.

    Raises ``ValueError`` if the most likely tokens were not reported.
    """
    if not token.top:
        raise ValueError("the engine did not report the most likely tokens")
    mean = -sum(logprob for _, logprob in token.top) / len(token.top)
    return round(min(mean, MAX_TOKEN_CONFIDENCE), 3)


def group_confidences(confidences: Sequence[float], window: int) -> list[float]:
    """Return the confidence of every window of ``window`` tokens, in order; a shorter text is one group."""
    if not confidences:
        return []
    size = min(window, len(confidences))
    sums = [0.0, *accumulate(confidences)]
    return [(after - before) / size for before, after in zip(sums, sums[size:], strict=False)]


def bottom_confidence(confidences: Sequence[float], window: int) -> float:
    """Return the mean of the lowest tenth of the groups (at least one)."""
    ordered = sorted(group_confidences(confidences, window))
    lowest_tenth = ordered[: max(1, len(ordered) // 10)]
    return sum(lowest_tenth) / len(lowest_tenth)


def tail_confidence(confidences: Sequence[float], window: int) -> float:
    """Return the confidence of the last group: errors at the end affect the answer most."""
    return group_confidences(confidences[-window:], window)[-1]


def lowest_confidence(confidences: Sequence[float], window: int) -> float:
    """Return the confidence of the least confident group."""
    return min(group_confidences(confidences, window))


def mean_confidence(confidences: Sequence[float], window: int) -> float:  # noqa: ARG001
    """Return the mean over all tokens."""
    return sum(confidences) / len(confidences)


MEASURES: dict[ConfidenceMeasure, Callable[[Sequence[float], int], float]] = {
    "bottom": bottom_confidence,
    "tail": tail_confidence,
    "lowest": lowest_confidence,
    "mean": mean_confidence,
}
"""Measures of a whole solution's confidence by name; each needs at least one token."""


def confidence_threshold(values: Sequence[float], percent: float) -> float:
    """Return the confidence that the best ``percent`` per cent of the solutions reach, at least one of them.

    This is the percentile 100 - ``percent`` with linear interpolation.
    """
    return min(float(np.percentile(values, 100.0 - percent)), max(values))
