"""Weights of few bits in groups of columns that share scale and zero, as of GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.matrix import MATRIX_DEPTH, Multiply, QuantizedMatrix, stack
from kernels.common.quantization import Quantization
from kernels.linear import int4
from kernels.linear.fp32 import Product
from kernels.linear.int4 import Int4Linear
from kernels.linear.weight_only_int4 import int4_linear, pack_int4
from kernels.linear.weight_only_int8 import int8_weight_linear


@dataclass(frozen=True, slots=True)
class GroupedMatrix(QuantizedMatrix):
    """``(codes - zeros) * scales``, where groups of columns share scale and zero. Activations are not rounded."""

    codes: Tensor
    """uint8 ``[out, in]``."""
    scales: Tensor
    """float32 ``[out, groups]``."""
    zeros: Tensor
    """float32 ``[out, groups]``, integers in units of codes."""
    bits: int
    group_of: Tensor | None = None
    """int64 ``[in]``, the group of each column; ``None``: groups of consecutive columns, equally many in each."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1]

    @property
    def has_equal_groups(self) -> bool:
        """True if all groups have equally many columns."""
        return self.group_of is None or len(set(self.group_of.bincount(minlength=self.scales.shape[1]).tolist())) == 1

    def dense(self) -> Tensor:
        if self.group_of is not None:
            return (self.codes - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]
        groups = self.codes.view(len(self.codes), self.scales.shape[1], -1)
        return ((groups - self.zeros[..., None]) * self.scales[..., None]).view(self.codes.shape)

    def can_fuse(self, below: GroupedMatrix) -> bool:
        """Return True if both have the same number of bits and the same columns in each group."""
        if self.bits != below.bits or self.scales.shape[1] != below.scales.shape[1]:
            return False
        if self.group_of is None or below.group_of is None:
            return self.group_of is below.group_of
        return torch.equal(self.group_of, below.group_of)

    @classmethod
    def create_cpu_product(cls, parts: Sequence[GroupedMatrix], bias: Tensor | None) -> Product | None:
        """Return an int4 product if the weights have 4 bits: an eighth of the memory.

        It rounds the activations, too, but far more finely than the checkpoint rounded the weights. Nothing is faster
        than float32 with 8 bits without rounding activations as coarsely as the weights.
        """
        first = parts[0]
        if first.bits != 4 or not first.has_equal_groups:
            return None
        if not int4.is_supported(first.codes.shape[1], first.scales.shape[1]):
            return None
        codes, order = stack([part.codes for part in parts]), None
        if first.group_of is not None:
            order = first.group_of.argsort(stable=True)
            codes = codes[:, order]
        scales, zeros = stack([part.scales for part in parts]), stack([part.zeros for part in parts])
        return Int4Linear(codes, scales, zeros=zeros, bias=bias, order=order)

    def find_missing_kernel(self) -> str | None:
        columns, num_groups = self.codes.shape[1], self.scales.shape[1]
        if not self.has_equal_groups:
            return f"weights of {columns} inputs in groups of different sizes"
        if columns // num_groups % MATRIX_DEPTH:
            return (
                f"weights of {columns} inputs in {num_groups} groups, each of which must be a multiple of "
                f"{MATRIX_DEPTH} inputs"
            )
        return None

    @classmethod
    def create_gpu_multiply(
        cls, parts: Sequence[GroupedMatrix], device: torch.device
    ) -> tuple[Multiply, Quantization | None]:
        codes, scales, zeros, order = _stack_groups(parts, device)
        if parts[0].bits == 4:
            weight = pack_int4(codes, scales, zeros, order)
            return lambda x, bias, **options: int4_linear(x, weight, bias, **options), None
        middle = 1 << 7
        is_symmetric = all(bool((part.zeros == middle).all()) for part in parts)
        shifted, offsets = (codes.to(torch.int16) - middle).to(torch.int8), None if is_symmetric else zeros - middle
        return lambda x, bias, **options: int8_weight_linear(
            x, shifted, scales, bias, zeros=offsets, order=order, **options
        ), None


def _stack_groups(parts: Sequence[GroupedMatrix], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return codes ``[out, in]``, scales and zeros ``[groups, out]``, and the order of the inputs, sorted by group."""
    codes, scales = stack([part.codes for part in parts]).to(device), stack([part.scales for part in parts]).T
    zeros, group_of, order = stack([part.zeros for part in parts]).T.contiguous().to(device), parts[0].group_of, None
    if group_of is not None:
        sorted_by_group = group_of.argsort(stable=True).to(device)
        codes, order = codes[:, sorted_by_group], sorted_by_group.to(torch.int32)
    half = scales.half()  # the dtype in most checkpoints
    scales = half if torch.equal(half.float(), scales) else scales
    return codes, scales.contiguous().to(device), zeros, order
