"""Matrix products with fixed weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import availability


class Product(Protocol):
    """A matrix product with fixed weights ``[out, in]``, of any type and layout."""

    @property
    def parameters(self) -> int:
        """Number of weights."""
        ...

    @property
    def is_kernel(self) -> bool:
        """True if the product only launches a kernel of ``kernels.cpu``, so that kernel graphs can record it."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product ``[rows, out]`` of ``x`` ``[rows, in]``."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``residual + self(x)``, in one pass if there is a kernel."""
        ...


class Linear:
    """``x @ weight.T + bias`` for many ``x`` and one float32 ``weight`` ``[out, in]``.

    On a CPU the weights are packed once (``kernels.cpu.linear.fp32``), and each row of the result is, bit for bit,
    independent of the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keeps no reference to a ``weight`` that is packed."""
        self.parameters = weight.numel() + (0 if bias is None else bias.numel())
        """Number of weights."""
        self.is_kernel = availability.can_use_kernels(weight)
        self._product = _layout(weight)
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._bias, None)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
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
