"""Matrix products with fixed weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import availability

_PACKED_FOR = 16
"""Rows that oneDNN lays the weights out for. The layout serves every number of rows; this one loses nowhere."""


class Product(Protocol):
    """A product with fixed weights ``[out, in]``, in whatever layout."""

    @property
    def parameters(self) -> int:
        """Number of weights."""
        ...

    @property
    def is_kernel(self) -> bool:
        """Whether it does nothing but launch a kernel of ``kernels.cpu``."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``, in one pass where the hardware allows."""
        ...


class Linear:
    """``x @ weight.T + bias`` for many ``x`` and one float32 ``weight`` ``[out, in]``.

    On a CPU the weights are laid out once: for ``kernels.cpu.linear.fp32``, or where numba is missing for oneDNN, which
    at 2 to 64 rows is two to four times faster so than ``F.linear``, which repacks them at every call. Each row of the
    result is then, bit for bit, independent of the other rows. ``tests/kernels/linear/test_fp32.py`` holds both to
    that.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keeps no reference to ``weight`` where it is laid out anew."""
        self.parameters = weight.numel() + (0 if bias is None else bias.numel())
        """Number of weights."""
        self.is_kernel = _has_kernel(weight)
        """See ``Product``."""
        self._product = _layout(weight)
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``."""
        return self._product(x, self._bias, None)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``, in one pass where the hardware allows."""
        return self._product(x, self._bias, residual)


def _layout(weight: Tensor) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The product of ``x``, ``bias`` and ``residual`` with a weight."""
    if weight.device.type == "cpu":
        if _has_kernel(weight):
            from kernels.cpu.linear.fp32 import FloatPanels

            return FloatPanels(weight).product
        if torch._C._has_mkldnn:
            return _OneDnn(weight).product
    return partial(_plain, weight)


def _has_kernel(weight: Tensor) -> bool:
    return availability.computes(weight)


def _plain(weight: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    out = F.linear(x, weight, bias)
    return out if residual is None else residual + out


class _OneDnn:
    """oneDNN sums along ``in`` in one order for every number of rows above 1; a single row is computed as two."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if len(x) == 1:
            return self.product(torch.cat((x, x)), bias, None if residual is None else torch.cat((residual, residual)))[
                :1
            ]
        if residual is None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, bias, "add")
        return out
