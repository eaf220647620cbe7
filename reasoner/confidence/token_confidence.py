"""How sure a model was of each token, and of a solution by its weakest stretches.

Source: Fu et al. 2025, "Deep Think with Confidence", sections 2 and 3.1. The confidence of a token is minus the mean
log-probability of the k likeliest tokens at its place: when one token takes all, the others are far down and the mean
is low. A group is a window of neighbouring tokens, and its confidence the mean of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

from engine.protocol.types import TokenLogprob

MAX_TOKEN_CONFIDENCE = 100.0
"""Stands for the confidence of a token beside which others are impossible: numbers in a journal are finite."""

ConfidenceMeasure = Literal["bottom", "tail", "lowest", "mean"]


def compute_token_confidence(token: TokenLogprob) -> float:
    """Of one token, in nats, with three decimals: what a journal keeps is what decisions are made on.

    Raises ``ValueError`` when the likeliest tokens were not reported.
    """
    if not token.top:
        raise ValueError("the engine did not report the likeliest tokens")
    mean = -sum(logprob for _, logprob in token.top) / len(token.top)
    return round(min(mean, MAX_TOKEN_CONFIDENCE), 3)


def group_confidences(confidences: Sequence[float], window: int) -> list[float]:
    """The confidence of every window of this many tokens, in order. A shorter text is one group; an empty one none."""
    if not confidences:
        return []
    size = min(window, len(confidences))
    sums = [0.0, *accumulate(confidences)]
    return [(after - before) / size for before, after in zip(sums, sums[size:], strict=False)]


def bottom_confidence(confidences: Sequence[float], window: int) -> float:
    """The mean of the lowest tenth of the groups (at least one)."""
    ordered = sorted(group_confidences(confidences, window))
    kept = ordered[: max(1, len(ordered) // 10)]
    return sum(kept) / len(kept)


def tail_confidence(confidences: Sequence[float], window: int) -> float:
    """The confidence of the last group: errors at the end cost the answer."""
    return group_confidences(confidences[-window:], window)[-1]


def lowest_confidence(confidences: Sequence[float], window: int) -> float:
    """The confidence of the weakest group."""
    return min(group_confidences(confidences, window))


def mean_confidence(confidences: Sequence[float], window: int) -> float:  # noqa: ARG001
    """The mean of all tokens."""
    return sum(confidences) / len(confidences)


MEASURES: dict[ConfidenceMeasure, Callable[[Sequence[float], int], float]] = {
    "bottom": bottom_confidence,
    "tail": tail_confidence,
    "lowest": lowest_confidence,
    "mean": mean_confidence,
}
"""What a whole solution's confidence is; all need at least one token."""


def confidence_threshold(values: Sequence[float], percent: float) -> float:
    """The confidence that the best ``percent`` per cent of these solutions reach; at least one does.

    The percentile 100 - percent, between two solutions interpolated (the usual linear rule), and for a ``percent`` of
    0 the best one.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * (100.0 - percent) / 100.0
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return min(ordered[below] + (place - below) * (ordered[above] - ordered[below]), ordered[-1])
