"""Matrix products with fixed weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_PACKED_FOR = 16
"""Rows that oneDNN lays the weights out for. The layout serves every number of rows; this one loses nowhere."""


class Product(Protocol):
    """A product with fixed weights ``[out, in]``, in whatever layout."""

    @property
    def parameters(self) -> int:
        """Number of weights."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``, in one pass where the hardware allows."""
        ...


class Linear:
    """``x @ weight.T + bias`` for many ``x`` and one ``weight`` ``[out, in]``.

    On a CPU with oneDNN the weights are laid out once in its blocked format: at 2 to 64 rows two to four times faster
    than ``F.linear``, which repacks them at every call. There each row of the result is, bit for bit, independent of
    the other rows: oneDNN sums along ``in`` in one order for every number of rows above 1, and a single row is
    computed as two. ``tests/kernels/test_linear.py`` holds it to that.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keeps no reference to ``weight`` where it is packed."""
        self.parameters = weight.numel() + (0 if bias is None else bias.numel())
        """Number of weights."""
        self._bias = bias
        self._packed = weight.device.type == "cpu" and torch._C._has_mkldnn
        self._weight = weight
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        if len(x) == 1:
            return self(torch.cat((x, x)))[:1]
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``, in one pass where the hardware allows."""
        if not self._packed:
            return residual + F.linear(x, self._weight, self._bias)
        if len(x) == 1:
            return self.add(torch.cat((x, x)), torch.cat((residual, residual)))[:1]
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return out
