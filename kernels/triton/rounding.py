"""Rounding to whole numbers, which Triton has no portable function for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_even(x):
    """The nearest whole number of a float32 below 2**22 in magnitude, of two the even one, as ``torch.round``.

    Added to 1.5 * 2**23 there are no bits left for a fraction, and the sum is rounded so.
    """
    return (x.to(tl.float32) + 12582912.0) - 12582912.0
