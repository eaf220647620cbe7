"""Matrix products with fixed weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import availability
from kernels.cpu.linear.fp32 import PackedFloat32


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


Multiply = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""A function ``(x, bias, residual) -> x @ weight.T + bias + residual``."""


class WeightProduct:
    """A ``Product`` computed by a function that holds the packed weight."""

    def __init__(self, multiply: Multiply, num_weights: int, bias: Tensor | None, *, is_kernel: bool) -> None:
        self.parameters = num_weights + (0 if bias is None else bias.numel())
        self.is_kernel = is_kernel
        self._multiply = multiply
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._bias, None)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._multiply(x, self._bias, residual)


class Linear(WeightProduct):
    """``x @ weight.T + bias`` for many ``x`` and one float32 ``weight`` ``[out, in]``.

    On a CPU the weights are packed once (``kernels.cpu.linear.fp32``), and each row of the result is, bit for bit,
    independent of the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keeps no reference to a ``weight`` that is packed."""
        is_kernel = availability.can_use_kernels(weight)
        multiply = PackedFloat32(weight).product if is_kernel else partial(_multiply_unpacked, weight)
        super().__init__(multiply, weight.numel(), bias, is_kernel=is_kernel)


def _multiply_unpacked(weight: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    out = F.linear(x, weight, bias)
    return out if residual is None else residual + out
