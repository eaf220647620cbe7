"""Errors of float32, from computations in float64 in which the result of every operation is rounded at random.

One float32 run is a single sample of rounding errors, and another order of its sums is another sample: a ratio of the
two is no bound. Here each operation errs independently by as much as float32 may in any order of its sums, some runs
are made, and all their errors count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.reference import float64
from tests.closeness import EPS
from tests.seeds import shift

Result = TypeVar("Result")

RUNS = 4
MARGIN = 4.0
"""Largest allowed ratio of an error to the largest of ``RUNS`` runs.

Positions of a text differ in how much they amplify an error, and a compared text need not have the worst. A result that
was rounded to 16 bits somewhere has hundreds of times the error.
"""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.addmm: (1, 2), _aten.baddbmm: (1, 2)}
"""Products, with the places of their factors."""
_SUMS = {_aten.sum, _aten.mean}
_OF_ROWS = {_aten._softmax, _aten._log_softmax, _aten.logsumexp, _aten.native_layer_norm, _aten._fused_rms_norm}
"""Operations on rows, with a sum of positive terms."""
_LOGARITHMS = {_aten._log_softmax, _aten.logsumexp}
_ROUNDINGS = dict.fromkeys(
    (_aten.add, _aten.sub, _aten.rsub, _aten.mul, _aten.div, _aten.add_, _aten.sub_, _aten.mul_, _aten.div_), 1
) | dict.fromkeys(
    (_aten.reciprocal, _aten.sqrt, _aten.rsqrt, _aten.pow, _aten.exp, _aten.log, _aten.cos, _aten.sin, _aten.tanh), 2
)
_ROUNDINGS |= dict.fromkeys((_aten.sigmoid, _aten.silu, _aten.gelu), 4)
"""Roundings in an element: functions are accurate to a unit in the last place, and these activations have several."""


class _RandomRounding(TorchDispatchMode):
    """Adds to the result of every float64 operation an error of the size that it may have in float32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(shift(seed))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        result = found[0] if isinstance(found, tuple) else found
        if isinstance(result, Tensor) and result.dtype == torch.float64 and not result.is_meta:
            size = _error_size(function.overloadpacket, args, result)
            if size is not None:
                error = size * (2 * torch.rand(result.shape, generator=self._generator) - 1)
                result += torch.where(error.isfinite(), error, 0.0)  # masks hold infinities
        return found


def _error_size(operation: Any, args: Sequence[Any], result: Tensor) -> Tensor | None:
    """Return the largest error of each element of a result in float32; None for copies, which have none.

    A sum of n terms errs like a random walk (``closeness.product_bound``): in the worst order, a single chain, by a
    standard deviation of EPS / 5 times the Euclidean norms, whose uniform noise reaches sqrt(3) times as far.
    """
    chain = EPS * math.sqrt(3) / 5
    if operation in _PRODUCTS:
        left, right = (args[place] for place in _PRODUCTS[operation])
        return chain * left.norm(dim=-1, keepdim=True) * right.norm(dim=-2, keepdim=True) + EPS / 2 * result.abs()
    if operation in _SUMS:
        terms = args[0].numel() / result.numel()
        dims, keeps = args[1] if len(args) > 1 else None, len(args) > 2 and args[2]
        largest = args[0].abs().amax(dims or (), keepdim=keeps) / (terms if operation is _aten.mean else 1)
        return chain * terms * largest + EPS / 2 * result.abs()
    if operation in _OF_ROWS:  # the sum's relative error is the logarithm's absolute one
        size = result.abs() + 1 if operation in _LOGARITHMS else result.abs()
        return (2 * EPS + chain * math.sqrt(args[0].shape[-1])) * size
    return EPS / 2 * _ROUNDINGS[operation] * result.abs() if operation in _ROUNDINGS else None


def compute_rounded(compute: Callable[[], Result], runs: int = RUNS) -> list[Result]:
    """Return the results of some computations in float64 with random roundings."""
    results = []
    for run in range(runs):
        with float64(), sdpa_kernel(SDPBackend.MATH), _RandomRounding(run):  # attention too by its products
            results.append(compute())
    return results


def float32_bound(compute: Callable[[], Tensor]) -> float:
    """Return the bound on the error of each number that ``compute`` returns, if it is computed in float32.

    ``compute`` computes in torch's default dtype.
    """
    with float64():
        exact = compute()
    return MARGIN * max(float((rounded - exact).abs().max()) for rounded in compute_rounded(compute))
