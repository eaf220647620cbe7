"""Functions of numbers inside other kernels."""

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
