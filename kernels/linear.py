"""Matrix products with fixed weights."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


class Linear:
    """``x @ weight.T + bias`` for many ``x`` and one ``weight`` ``[out, in]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.parameters = weight.numel() + (0 if bias is None else bias.numel())
        """Number of weights."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``."""
        return F.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``, in one pass where the hardware allows."""
        return residual + self(x)
