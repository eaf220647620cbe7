"""The smallest logit that top-k and top-p keep, without sorting the row."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.runtime.kernel import function
from kernels.cpu.sampling.blocks import BLOCK, weigh
from kernels.cpu.simd.exp import exp32

_MAX_SORTED = 32
"""Tokens between the bounds of a threshold that are sorted instead of narrowing the bounds further."""
_MIN_STEP = np.float32(1e-30)
"""A first step that is not denormal, which the processor may take for 0."""
_MAX_FALSI_ROUNDS = 16
"""Rounds of regula falsi before bisection."""


@function
def find_smallest_kept(x: Any, maxima: Any, weights: Any, top: Any, factor: Any, top_k: int, top_p: float) -> Any:
    """Return the smallest logit that top-k and top-p keep."""
    vocab = len(x)
    smallest = np.float32(-np.inf)
    total = 0.0
    if 0 < top_k < vocab:
        for i in range(vocab):
            weights[i] = np.float32(1)
        smallest = _find_threshold(x, maxima, weights, top, np.float32(1), np.float64(top_k))
    if top_p < 1:
        total = weigh(x, top, factor, weights)
        if smallest > -np.inf:
            # Of the tokens that tie with the last of the top-k, top-p counts as many as make up the k.
            count, total = _sum_reaching(x, maxima, weights, smallest)
            total -= (count - top_k) * np.float64(exp32((smallest - top) * factor))
        step = max(np.float32(1) / factor, _MIN_STEP)
        smallest = max(smallest, _find_threshold(x, maxima, weights, top, step, top_p * total))
    return smallest


@function
def _find_threshold(x: Any, maxima: Any, weights: Any, top: Any, step: Any, goal: float) -> Any:
    """Return the largest logit such that the weights of the tokens that reach it sum to the goal or more.

    Minus infinity if the sum of all possible tokens is less. ``_bracket`` finds bounds of the threshold, which are
    narrowed by regula falsi until few tokens lie between them, and by bisection if that takes long. These tokens are
    sorted.
    """
    low, count_low, sum_low, high, count_high, sum_high = _bracket(x, maxima, weights, top, step, goal)
    if low == -np.inf:
        return low
    excess, missing = sum_low - goal, goal - sum_high
    rounds, last_moved_low = 0, False
    while count_low - count_high > _MAX_SORTED:
        middle = _interpolate(low, high, min(high, top), excess / (excess + missing), rounds)
        if middle <= low or middle >= high:
            return low
        count, reached = _sum_reaching(x, maxima, weights, middle)
        moves_low = reached >= goal
        # Dowell and Jarratt 1971: a bound that stays twice counts half, so that both come near.
        stays_again = rounds > 0 and last_moved_low == moves_low
        if moves_low:
            low, count_low, excess = middle, count, reached - goal
            missing = 0.5 * missing if stays_again else missing
        else:
            high, count_high, sum_high, missing = middle, count, reached, goal - reached
            excess = 0.5 * excess if stays_again else excess
        last_moved_low = moves_low
        rounds += 1
    return _sort_between(x, maxima, weights, low, high, sum_high, goal)


@function
def _bracket(x: Any, maxima: Any, weights: Any, top: Any, step: Any, goal: float) -> Any:
    """Step down from the top, twice as far each time, until the tokens that reach the logit have the goal.

    Returns that logit and the one before (infinity if there is none), and behind each the number of tokens that reach
    it and the sum of their weights.
    """
    high, count_high, sum_high = np.float32(np.inf), 0, 0.0
    while True:
        low = np.float32(top - step)
        count_low, sum_low = _sum_reaching(x, maxima, weights, low)
        if sum_low >= goal or low == -np.inf:
            return low, count_low, sum_low, high, count_high, sum_high
        high, count_high, sum_high = low, count_low, sum_low
        step *= np.float32(2)


@function
def _interpolate(low: Any, high: Any, top: Any, share: float, rounds: int) -> Any:
    """Return a logit between two others: ``share`` of the way to ``top``, or half of it after many rounds."""
    width = top - low
    middle = np.float32(low + np.float32(share if rounds < _MAX_FALSI_ROUNDS else 0.5) * width)
    if middle <= low or middle >= high:
        middle = np.float32(low + np.float32(0.5) * width)
    return middle


@function
def _sum_reaching(x: Any, maxima: Any, weights: Any, smallest: Any) -> Any:
    """Return the number of tokens that reach a logit, and the sum of their weights."""
    count, total = 0, 0.0
    for block in range(len(maxima)):
        if maxima[block] >= smallest:
            start, end = block * BLOCK, (block + 1) * BLOCK
            block_count, block_total = _sum_block_reaching(x[start:end], weights[start:end], smallest)
            count += block_count
            total += block_total
    return count, total


@function
def _sum_block_reaching(x: Any, weights: Any, smallest: Any) -> Any:
    count, total = np.int32(0), np.float32(0)
    for i in range(len(x)):
        reaches = x[i] >= smallest
        count += np.int32(reaches)
        total += weights[i] if reaches else np.float32(0)
    return count, total


@function
def _sort_between(x: Any, maxima: Any, weights: Any, low: Any, high: Any, total: float, goal: float) -> Any:
    """Return the logit in ``[low, high)`` at which ``total`` and the weights, by descending logits, reach the goal."""
    logits, sorted_weights = np.empty(_MAX_SORTED, np.float32), np.empty(_MAX_SORTED, np.float32)
    count = 0
    for block in range(len(maxima)):
        start = block * BLOCK
        if maxima[block] >= low and _any_between(x[start : start + BLOCK], low, high):
            for i in range(start, min(start + BLOCK, len(x))):
                if low <= x[i] < high:
                    rank = count
                    while rank > 0 and logits[rank - 1] < x[i]:
                        logits[rank], sorted_weights[rank] = logits[rank - 1], sorted_weights[rank - 1]
                        rank -= 1
                    logits[rank], sorted_weights[rank] = x[i], weights[i]
                    count += 1
    for rank in range(count):
        total += np.float64(sorted_weights[rank])
        if total >= goal:
            return logits[rank]
    return low


@function
def _any_between(x: Any, low: Any, high: Any) -> Any:
    is_any = np.int32(0)
    for i in range(len(x)):
        is_any |= np.int32((x[i] >= low) & (x[i] < high))
    return is_any != 0
