"""Softmax of scores in vectors of sixteen."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.runtime.kernel import function
from kernels.cpu.simd.vector import add, divide, exp, load, multiply, splat, store, subtract


@function
def cap(scores: Any, softcap: Any) -> Any:
    """Return ``softcap * tanh(scores / softcap)`` of a vector."""
    twice = exp(multiply(scores, splat(np.float32(2) / softcap)))
    tanh = subtract(splat(np.float32(1)), divide(splat(np.float32(2)), add(twice, splat(np.float32(1)))))
    return multiply(tanh, splat(softcap))


@function
def exponentials(scores: int, size: int, top: Any) -> Any:
    """Replace each of ``size`` scores at an address by ``exp(score - top)``; return their sum by lanes."""
    sums = splat(np.float32(0))
    for i in range(0, size, 16):
        weight = exp(subtract(load(scores + 4 * i), splat(top)))
        store(scores + 4 * i, weight)
        sums = add(sums, weight)
    return sums
