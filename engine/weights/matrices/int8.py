"""Weights of 8 bits with a scale for each row, for activations of 8 bits (W8A8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.matrix import MATRIX_DEPTH_8BIT, Multiply, QuantizedMatrix, stack
from kernels.common.quantization import Quantization
from kernels.linear import int8
from kernels.linear.fp32 import Product
from kernels.linear.int8 import Int8Linear
from kernels.linear.weight_only_int8 import QUANTIZATION, int8_linear


@dataclass(frozen=True, slots=True)
class Int8Matrix(QuantizedMatrix):
    """``codes * scales``, with activations rounded to 8 bits, too, row by row (W8A8)."""

    codes: Tensor
    """int8 ``[out, in]``."""
    scales: Tensor
    """float32 ``[out]``."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1]

    def dense(self) -> Tensor:
        return self.codes * self.scales[:, None]

    @classmethod
    def create_cpu_product(cls, parts: Sequence[Int8Matrix], bias: Tensor | None) -> Product | None:
        """Return an int8 product, the fastest for every shape and number of rows."""
        if not int8.is_supported(parts[0].codes.shape[1]):
            return None
        return Int8Linear(stack([part.codes for part in parts]), stack([part.scales for part in parts]), bias)

    def find_missing_kernel(self) -> str | None:
        columns = self.codes.shape[1]
        if columns % MATRIX_DEPTH_8BIT:
            return f"weights of {columns} inputs by activations of 8 bits, which takes multiples of {MATRIX_DEPTH_8BIT}"
        return None

    @classmethod
    def create_gpu_multiply(
        cls, parts: Sequence[Int8Matrix], device: torch.device
    ) -> tuple[Multiply, Quantization | None]:
        codes = stack([part.codes for part in parts]).to(device)
        scales = stack([part.scales for part in parts]).to(device)
        return lambda x, bias, **options: int8_linear(x, codes, scales, bias, **options), QUANTIZATION
