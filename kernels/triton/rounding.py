"""Rounding to integers, for which Triton has no portable function."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_even(x):
    """Round a float32 below 2**22 in magnitude to the nearest integer, ties to even, as ``torch.round``.

    A sum with 1.5 * 2**23 has no bits left for a fraction, so it is rounded that way.
    """
    return (x.to(tl.float32) + 12582912.0) - 12582912.0
