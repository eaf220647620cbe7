"""A row of logits in blocks: the largest logit of each block, and the weights of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.runtime.kernel import function
from kernels.cpu.simd.exp import exp32

BLOCK = 128
"""Tokens that are summed in float32; sums of blocks are float64."""

_INFINITY_BITS = np.int32(0x7F800000)
_ORDERED_MINUS_INFINITY = np.int32(-0x7F800001)
_MAX_INT32 = np.int32(0x7FFFFFFF)
_31 = np.int32(31)


def num_blocks(vocab: int) -> int:
    """Return the number of blocks of a row."""
    return -(-vocab // BLOCK)


@function
def block_maxima(x: Any, maxima: Any) -> Any:
    """Write the largest logit of each block; return True if no logit is NaN and the largest is finite."""
    bits = x.view(np.int32)
    least, most = _INFINITY_BITS, _ORDERED_MINUS_INFINITY
    for block in range(len(maxima)):
        low, high = _ordered_extremes(bits[block * BLOCK : (block + 1) * BLOCK])
        least, most = min(least, low), max(most, high)
        maxima.view(np.int32)[block] = _to_ordered(high)
    return least >= _ORDERED_MINUS_INFINITY and _ORDERED_MINUS_INFINITY < most < _INFINITY_BITS


@function
def _ordered_extremes(bits: Any) -> Any:
    """Return the least and the most, as integers in the order of floats; NaNs lie beyond the infinities.

    LLVM vectorises the extremes of integers, unlike those of floats.
    """
    least, most = _MAX_INT32, np.int32(-_MAX_INT32)
    for i in range(len(bits)):
        value = _to_ordered(bits[i])
        least, most = min(least, value), max(most, value)
    return least, most


@function
def _to_ordered(bits: Any) -> Any:
    """Map a float's bits to an integer in the order of floats, or such an integer back to the bits."""
    return np.int32(bits ^ np.int32(np.int32(bits >> _31) & _MAX_INT32))


@function
def weigh(x: Any, top: Any, factor: Any, weights: Any) -> float:
    """Write the weight of each token of a row; return their sum."""
    total = 0.0
    for start in range(0, len(x), BLOCK):
        end = start + BLOCK
        total += weigh_block(x[start:end], top, factor, np.float32(-np.inf), weights[start:end])
    return total


@function
def weigh_block(x: Any, top: Any, factor: Any, smallest_kept: Any, weights: Any) -> Any:
    """Write the weights ``exp((x - top) * factor)`` of the tokens that are kept, 0 for others; return their sum."""
    for i in range(len(x)):
        weight = exp32((x[i] - top) * factor)
        weights[i] = weight if x[i] >= smallest_kept else np.float32(0)
    # In a loop of its own: a loop that also writes is vectorised only if what it writes does not lie closely behind
    # what it reads, and the order of the sum would depend on that.
    total = np.float32(0)
    for i in range(len(x)):
        total += weights[i]
    return total
