"""Scores of a query that become weights, in vectors of sixteen."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.runtime.kernel import function
from kernels.cpu.simd.vector import add, divide, exp, load, multiply, splat, store, subtract


@function
def capped(scores: Any, softcap: Any) -> Any:
    """``softcap * tanh(scores / softcap)`` of a vector."""
    twice = exp(multiply(scores, splat(np.float32(2) / softcap)))
    tanh = subtract(splat(np.float32(1)), divide(splat(np.float32(2)), add(twice, splat(np.float32(1)))))
    return multiply(tanh, splat(softcap))


@function
def exponentials(scores: int, size: int, most: Any) -> Any:
    """Makes each of ``size`` scores at an address ``exp(score - most)``. Returns the sums of its lanes."""
    sums = splat(np.float32(0))
    for i in range(0, size, 16):
        weight = exp(subtract(load(scores + 4 * i), splat(most)))
        store(scores + 4 * i, weight)
        sums = add(sums, weight)
    return sums
