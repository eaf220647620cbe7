"""Bounds on rounding errors, derived from the computation and never from the processor, its vectors or its threads.

Those of a whole model's results come from ``tests.rounding``. Three kinds of comparison need none of these:

- ``pytest.approx`` and ``assert_close`` of float64 with their own tolerance (1e-6): the same formula in another order.
- ``torch.equal`` and a tolerance of 0: the same operations in the same order, or numbers that float32 holds exactly.
- Intended differences (int8 for float32, one model for another): their bound is a fraction of the compared value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
"""Distance from 1 to the next float32: twice the largest relative error of one rounding."""


def assert_rounded(ours: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """Assert that every difference is within ``bound``: one of those below, or ``EPS`` times a size and a number of
    roundings.
    """
    assert exact.dtype == torch.float64
    assert ours.shape == exact.shape
    excess = (ours.double() - exact).abs() - bound
    worst = int(excess.argmax())
    found, right = float(ours.flatten()[worst]), float(exact.flatten()[worst])
    assert bool((excess <= 0).all()), f"{found} for {right} is {float(excess.max()):.3g} beyond its bound"


def product_bound(x: Tensor, weight: Tensor) -> Tensor:
    """Return the rounding bound of every element of ``x @ weight.T``: ``4 EPS |x| |weight|``.

    Partial sums of n products of any sign grow like a random walk, so n roundings of up to EPS / 2 have a standard
    deviation of EPS / 5 times the Euclidean norms, in the worst order (a single chain). How far a walk goes varies from
    element to element, and its square with it, so errors fall like an exponential rather than like a normal
    distribution: with a walk W of length 1, E exp(a^2 / 2 * integral of W^2) = cos(a)^(-1/2) (Cameron and Martin), and
    an error exceeds t deviations with a probability of about exp(-pi / 2 * t). Ten deviations are exceeded once in ten
    million elements, which is a few tests. The bound is twenty: once in 10^13.
    """
    norms = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    return 4 * EPS * norms


def log_sum_bound(terms: int) -> float:
    """Return the absolute rounding bound of the logarithm of a sum of exponentials: the sum's relative error.

    Each exponential is accurate to two units; the terms are positive, so their rounding errors add up like the square
    root of their number.
    """
    return EPS * (4 + math.sqrt(terms))


def unit_bound(dtype: torch.dtype, terms: int = 2048) -> float:
    """Return the rounding bound of a kernel's result in ``dtype``, relative to the largest element.

    In 16 bits two units in the last place: one for the result and one for intermediate rounding. In float32 a sum of
    ``terms`` terms errs by their square root, doubled.
    """
    return 2 * (torch.finfo(dtype).eps if dtype != torch.float32 else math.sqrt(terms) * EPS)


def attention_bound(q: Tensor, k: Tensor, v: Tensor, *, scale: float, keys: int) -> float:
    """Return the rounding bound of attention over ``keys`` keys; vectors are in the last dimension.

    A weight's relative error is its score's absolute error (``product_bound``, scaled), and the same again for the sum
    that it is divided by; an exponential, a soft cap, a rescaling and a merge add a few units. Means of values are sums
    of that many roundings, which add up like their square root. The bound also holds for log-sum-exps of scores if
    values exceed 1.
    """
    score = 2 * scale * float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    return EPS * (2 * score + 8 + math.sqrt(keys)) * float(v.abs().max())
