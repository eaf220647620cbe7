"""Functions inside the kernels of recurrent layers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return ``log(1 + exp(x))`` to a few units in the last place, also where it is small.

    ``log(1 + y)`` is ``2 atanh(y / (2 + y))``, whose series needs no logarithm: that of a GPU is inexact near 1.
    """
    y = tl.exp(-tl.abs(x))
    ratio = y / (2.0 + y)
    square = ratio * ratio
    series = 1.0 / 13.0 + square * (1.0 / 15.0)
    series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * series)
    series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * series)
    series = 1.0 + square * (1.0 / 3.0 + square * series)
    return tl.maximum(x, 0.0) + 2.0 * ratio * series


@triton.jit
def count_chained(SEGMENTS, first, MIN: tl.constexpr, is_long: tl.constexpr):
    """Return the number of segments of the chain that begins with the segment ``first``; 0 if none does.

    With ``MIN`` also 0 unless the chain has a segment of so many tokens or more, or without ``is_long`` if it has one.
    """
    count = tl.load(SEGMENTS + 5 * first + 4).to(tl.int32)
    if MIN > 0:
        longest = tl.zeros([], tl.int64)
        for index in range(first, first + count):
            start, end = tl.load(SEGMENTS + 5 * index), tl.load(SEGMENTS + 5 * index + 1)
            longest = tl.maximum(longest, end - start)
        count = tl.where((longest >= MIN) == is_long, count, 0)
    return count
