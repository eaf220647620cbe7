"""Matrix products with fixed weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.common.quantization import Quantization, Rows
from kernels.cpu import availability
from kernels.cpu.linear.fp32 import PackedFloat32
from kernels.cpu.linear.packed_weights import PackedWeights


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

    @property
    def quantization(self) -> Quantization | None:
        """The way in which inputs are quantized that the product also takes as ``QuantizedRows``."""
        ...

    def __call__(self, x: Rows) -> Tensor:
        """Return the product ``[rows, out]`` of ``x`` ``[rows, in]``."""
        ...

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        """Return ``residual + self(x)``, in one pass if there is a kernel."""
        ...

    def to_float32(self, x: Tensor) -> Tensor:
        """Return the product as it is accumulated, in float32, whatever the dtype of ``x`` and the weight."""
        ...


Multiply = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""A function ``(x, bias, residual) -> x @ weight.T + bias + residual``."""


class WeightProduct:
    """A ``Product`` computed by a function that holds the packed weight."""

    quantization = None
    packed: PackedWeights | None = None
    """The packed weight, if it is a single one of floats."""

    def __init__(self, multiply: Multiply, num_weights: int, bias: Tensor | None, *, is_kernel: bool) -> None:
        self.parameters = num_weights + (0 if bias is None else bias.numel())
        self.is_kernel = is_kernel
        self._multiply = multiply
        self.bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return self._multiply(x, self.bias, None)

    def add(self, x: Rows, residual: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return self._multiply(x, self.bias, residual)

    def to_float32(self, x: Tensor) -> Tensor:
        return self(x).float()


class Linear(WeightProduct):
    """``x @ weight.T + bias`` for many ``x`` and one float32 ``weight`` ``[out, in]``.

    On a CPU the weights are packed once (``kernels.cpu.linear.fp32``), and each row of the result is, bit for bit,
    independent of the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, is_batch_invariant: bool = False) -> None:
        """Keeps no reference to a ``weight`` that is packed. ``is_batch_invariant``: make the rows independent on a
        GPU, too."""
        is_kernel = availability.can_use_kernels(weight)
        self.narrow_weight = weight if weight.dtype != torch.float32 else None
        """The weight, if it is of a narrower dtype than float32."""
        self._is_batch_invariant = is_batch_invariant
        self.packed = PackedFloat32(weight) if is_kernel else None
        multiply = self.packed.product if self.packed is not None else partial(self._multiply_unpacked, weight)
        super().__init__(multiply, weight.numel(), bias, is_kernel=is_kernel)

    def to_float32(self, x: Tensor) -> Tensor:
        if self.narrow_weight is None:
            return super().to_float32(x)
        if self._is_batch_invariant:
            return multiply_invariantly(x, self.narrow_weight, self.bias, torch.float32)
        return multiply_to_float32(x, self.narrow_weight, self.bias)

    def _multiply_unpacked(self, weight: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        out = multiply_invariantly(x, weight, bias, x.dtype) if self._is_batch_invariant else F.linear(x, weight, bias)
        return out if residual is None else residual + out


def multiply_to_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` of narrow floats in float32, without a rounding of the result."""
    if x.is_cuda:
        product = torch.mm(x, weight.T, out_dtype=torch.float32)
        return product if bias is None else product.add_(bias)
    return multiply_in_float32(x, weight, bias, torch.float32)


def multiply_invariantly(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x @ weight.T + bias`` in ``dtype``; on a GPU no row depends, to the bit, on the others."""
    if x.is_cuda:
        from kernels.triton import invariant as on_gpu

        return on_gpu.product(x, weight, bias, dtype)
    return multiply_in_float32(x, weight, bias, dtype)


def multiply_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x @ weight.T + bias``, multiplied and added in float32, in ``dtype``."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
