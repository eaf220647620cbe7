"""Bounds on rounding, each derived from what is computed: never from a processor, its vectors or its threads.

Three kinds of comparison need none of these:

- ``pytest.approx`` and ``assert_close`` of float64 with their own tolerance (1e-6): the same formula in another order.
- ``torch.equal`` and a tolerance of 0: the same operations in the same order, or numbers that float32 holds exactly.
- Differences that are wanted (int8 for float32, one model for another): their bound is a share of what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
"""Between 1 and the next float32: twice the most that one rounding changes, relatively."""
RMS, MOST = 2.0, 4.0
"""Times a peer's error that a result may be off, in the mean and in its worst number.

Both round, in another order of sums: either may be the luckier one. Over 432 models, texts and processors 1.45 and 2.53
were the largest ratios. A result that was computed in 16 bits somewhere is hundreds of times less exact.
"""


def assert_as_exact_as(ours: Tensor | Sequence[float], peer: Tensor | Sequence[float], exact: Tensor) -> None:
    """Hold a float32 result to the errors of another float32 computation, ``peer``, both against float64."""
    ours, peer = torch.as_tensor(ours), torch.as_tensor(peer)
    assert exact.dtype == torch.float64
    assert ours.shape == peer.shape == exact.shape
    error, allowed = (ours.double() - exact).abs(), (peer.double() - exact).abs()
    # A peer may be right to the last bit by luck; nobody can be asked for more than the rounding of the result.
    last = EPS / 2 * exact.abs()
    for name, times, of in (("root mean square", RMS, _rms), ("largest", MOST, torch.amax)):
        found, most = float(of(error)), times * float(torch.maximum(of(allowed), of(last)))
        assert found <= most, f"{name} error is {found:.3g}, the peer's allows {most:.3g}"


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def assert_rounded(ours: Tensor, exact: Tensor, bound: Tensor | float) -> None:
    """Hold every number to ``bound``: one of those below, or ``EPS`` times a size and a count of roundings."""
    assert exact.dtype == torch.float64
    assert ours.shape == exact.shape
    excess = (ours.double() - exact).abs() - bound
    worst = int(excess.argmax())
    found, right = float(ours.flatten()[worst]), float(exact.flatten()[worst])
    assert bool((excess <= 0).all()), f"{found} for {right} is {float(excess.max()):.3g} beyond its bound"


def product_bound(x: Tensor, weight: Tensor) -> Tensor:
    """Return what rounding may change in ``x @ weight.T``, for every element: ``2 EPS |x| |weight|``.

    The sums on the way to n products of any sign grow like a random walk, so that n roundings of up to EPS / 2 of them
    have a standard deviation of EPS / 5 times the Euclidean norms, in the order that is worst (one chain). The bound is
    ten times as much.
    """
    norms = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    return 2 * EPS * norms


def log_sum_bound(terms: int) -> float:
    """Return what rounding may change in the logarithm of a sum of exponentials, absolutely: the sum's relative error.

    Each is right to two units; the sum is of positive numbers, and its roundings add up like their square root.
    """
    return EPS * (4 + math.sqrt(terms))


def unit_bound(dtype: torch.dtype, terms: int = 2048) -> float:
    """Return what rounding may change in a kernel's result of a type, relatively to the largest.

    Of 16 bits two units in the last place: one for the result and one for what was rounded on the way. In float32 a sum
    of so many ``terms`` changes like their square root, and by as much again.
    """
    return 2 * (torch.finfo(dtype).eps if dtype != torch.float32 else math.sqrt(terms) * EPS)


def attention_bound(q: Tensor, k: Tensor, v: Tensor, *, scale: float, keys: int) -> float:
    """Return what rounding may change in the attention of a query to so many ``keys``; vectors in the last dimension.

    A weight's relative error is its score's absolute one (``product_bound``, scaled), and as much again for the sum
    that it is divided by; an exponential, a soft cap, a rescaling and a merge add a few units. Means of values are sums
    of that many roundings, which add up like their square root. Log-sum-exps of the scores are within the same where
    values exceed 1.
    """
    score = 2 * scale * float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    return EPS * (2 * score + 8 + math.sqrt(keys)) * float(v.abs().max())
