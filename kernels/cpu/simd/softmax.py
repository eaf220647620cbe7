"""Softmax of scores in vectors of sixteen."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.runtime.kernel import function
from kernels.cpu.simd.vector import add, divide, exp, load, maximum, multiply, splat, store, subtract

_ONE = np.float32(1)
_MOST = np.float32(9 / 16)
"""A sixteenth of the least number whose hyperbolic tangent is 1 in float32."""
# Lambert's continued fraction to five terms: tanh(x) = x (1 + P1 x^2 + P2 x^4) / (1 + Q1 x^2 + Q2 x^4), right to 1e-9.
_P1, _P2, _Q1, _Q2 = (np.float32(c) for c in (105 / 945, 1 / 945, 420 / 945, 15 / 945))


@function
def cap(scores: Any, softcap: Any) -> Any:
    """Return ``softcap * tanh(scores / softcap)`` of a vector, with a relative error of a few units in the last place.

    A quotient of exponentials would have an absolute one, which ``softcap`` multiplies.
    """
    x = multiply(scores, splat(np.float32(1 / 16) / softcap))
    x = maximum(x, splat(-_MOST))
    x = subtract(splat(np.float32(0)), maximum(subtract(splat(np.float32(0)), x), splat(-_MOST)))
    z = multiply(x, x)
    over = multiply(x, add(splat(_ONE), multiply(z, add(splat(_P1), multiply(z, splat(_P2))))))
    under = add(splat(_ONE), multiply(z, add(splat(_Q1), multiply(z, splat(_Q2)))))
    for _ in range(4):  # tanh(2x) = 2 tanh(x) / (1 + tanh(x)^2)
        product = multiply(over, under)
        under = add(multiply(over, over), multiply(under, under))
        over = add(product, product)
    return multiply(divide(over, under), splat(softcap))


@function
def exponentials(scores: int, size: int, top: Any) -> Any:
    """Replace each of ``size`` scores at an address by ``exp(score - top)``; return their sum by lanes."""
    sums = splat(np.float32(0))
    for i in range(0, size, 16):
        weight = exp(subtract(load(scores + 4 * i), splat(top)))
        store(scores + 4 * i, weight)
        sums = add(sums, weight)
    return sums
