"""Matrix products on the CPU with 4-bit weights in groups of columns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import availability
from kernels.cpu.linear.int4 import PackedInt4
from kernels.linear.fp32 import Multiply, WeightProduct

_TORCH_GROUP_SIZES = (32, 64, 128, 256)
"""Columns of a group that torch's operator supports."""
_STEP, _MAX_GROUP_SIZE = 16, 256
"""Columns of a group of the kernel are a multiple of the first, and at most the second."""
_TORCH_OUTPUTS = 16
"""Outputs of torch's operator are a multiple of this."""


class Int4Linear(WeightProduct):
    """``x @ ((codes - zeros) * scales).T + bias``, an eighth of ``Linear``'s bytes.

    On a processor with AVX2 or ARM's dot products each group of each row of ``x`` is rounded to ``max|group| / 127 *
    {-127 … 127}``, and the sums within a group are exact integers. On others ``x`` is rounded to bfloat16, which is
    faster than ``Linear`` for up to 16 rows. Either way each row of the result is, bit for bit, independent of the
    other rows.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        """``codes``: uint8 ``[out, in]`` of 0 … 15, ``scales`` and ``zeros``: float32 ``[out, groups]``, the zeros
        whole numbers of 0 … 16. ``order``: int64 ``[in]``, the columns of ``x`` that the columns of ``codes`` belong
        to, if they are not in order. Keeps no reference to ``codes``. Raises ``ValueError`` unless ``is_supported``."""
        columns, groups = codes.shape[1], scales.shape[1]
        if not is_supported(columns, groups):
            raise ValueError(
                f"4-bit products of {columns} columns in {groups} groups are not supported on this machine"
            )
        multiply = _pack(codes, scales, zeros, order)
        super().__init__(multiply, codes.numel(), bias, is_kernel=availability.HAS_BYTE_PRODUCTS)


def is_supported(columns: int, groups: int) -> bool:
    """Return True if this machine computes ``Int4Linear`` with that many columns and groups."""
    if columns % groups:
        return False
    if not availability.HAS_BYTE_PRODUCTS:
        return columns // groups in _TORCH_GROUP_SIZES
    return _count_parts(columns // groups) > 0


def _count_parts(size: int) -> int:
    """Return the fewest equal parts of a group that the kernel computes; 0 if there are none."""
    return next((n for n in range(1, size // _STEP + 1) if size % (n * _STEP) == 0 and size // n <= _MAX_GROUP_SIZE), 0)


def _pack(codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None) -> Multiply:
    if not availability.HAS_BYTE_PRODUCTS:
        return _Torch(codes, scales, zeros, order).product
    parts = _count_parts(codes.shape[1] // scales.shape[1])
    split_scales, split_zeros = (grouped.repeat_interleave(parts, 1) for grouped in (scales, zeros))
    return PackedInt4(codes, split_scales, split_zeros, order).product


class _Torch:
    """Torch's operator, which takes activations in bfloat16."""

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None) -> None:
        self._rows, self._columns = codes.shape
        self._order, self._group = order, self._columns // scales.shape[1]
        num_padded = -self._rows % _TORCH_OUTPUTS
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(F.pad(codes, (0, 0, 0, num_padded)).int(), 1)
        # The operator computes (code - 8) * scale + offset.
        pairs = torch.stack((scales, (8 - zeros) * scales), dim=-1)
        self._scales = F.pad(pairs, (0, 0, 0, 0, 0, num_padded)).transpose(0, 1).to(torch.bfloat16).contiguous()

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if x.shape[1] != self._columns or x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype} {[*x.shape]}, the weight int4 {[self._rows, self._columns]}")
        if self._order is not None:
            x = x[:, self._order]
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self._packed, self._group, self._scales
        )
        result = out[:, : self._rows].float()
        for summand in (bias, residual):
            if summand is not None:
                result.add_(summand)
        return result
