"""Matrix products with fixed weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import availability


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

    On a CPU the weights are packed once (``kernels.cpu.linear.fp32``), and each row of the result is, bit for bit,
    independent of the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keeps no reference to ``weight`` where it is laid out anew."""
        self.parameters = weight.numel() + (0 if bias is None else bias.numel())
        """Number of weights."""
        self.is_kernel = availability.can_use_kernels(weight)
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
    """Return the function ``(x, bias, residual) -> x @ weight.T + bias + residual``."""
    if not availability.can_use_kernels(weight):
        return partial(_plain, weight)
    from kernels.cpu.linear.fp32 import PackedFloat32

    return PackedFloat32(weight).product


def _plain(weight: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    out = F.linear(x, weight, bias)
    return out if residual is None else residual + out
