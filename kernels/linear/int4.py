"""Matrix products with 4-bit weights in groups."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import availability

_GROUPS = (32, 64, 128, 256)
"""Columns of a group that torch's operator knows."""
_STEP, _MOST = 16, 256
"""Of ours a group has a multiple of this, and at most so many."""
_ROWS = 16
"""Torch's operator wants a multiple of this."""


class Int4Linear:
    """``x @ ((codes - zeros) * scales).T + bias``, an eighth of ``Linear``'s bytes.

    On a processor that multiplies bytes each group of each row of ``x`` is rounded to ``max|group| / 127 * {-127 …
    127}``, and the sums within a group are exact integers. Elsewhere ``x`` is rounded to bfloat16, which is faster than
    ``Linear`` up to 16 rows. Either way each row of the result is, bit for bit, independent of the other rows.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        """``codes``: uint8 ``[out, in]`` of 0 … 15, ``scales`` and ``zeros``: float32 ``[out, groups]``, the zeros
        whole numbers of 0 … 16. ``order``: int64 ``[in]``, the columns of ``x`` that the columns of ``codes`` belong
        to, where they are not in order. Keeps no reference to ``codes``. Raises ``ValueError`` where ``supported`` is
        false."""
        columns, groups = codes.shape[1], scales.shape[1]
        if not supported(columns, groups):
            raise ValueError(f"4-bit products of {columns} columns in {groups} groups are not supported here")
        self.parameters = codes.numel() + (0 if bias is None else bias.numel())
        """Number of weights."""
        self.is_kernel = availability.HAS_INT8_DOT
        """See ``Product``."""
        self._product = _layout(codes, scales, zeros, order)
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``, float32."""
        return self._product(x, self._bias, None)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``, in one pass where the hardware allows."""
        return self._product(x, self._bias, residual)


def supported(columns: int, groups: int) -> bool:
    """Whether this machine computes ``Int4Linear`` of so many columns in so many groups."""
    if columns % groups:
        return False
    return _split(columns // groups) > 0 if availability.HAS_INT8_DOT else columns // groups in _GROUPS


def _split(size: int) -> int:
    """The fewest equal parts of a group that the kernel computes; 0: there are none."""
    return next((n for n in range(1, size // _STEP + 1) if size % (n * _STEP) == 0 and size // n <= _MOST), 0)


def _layout(
    codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None
) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The product of ``x``, ``bias`` and ``residual`` with a weight."""
    if not availability.HAS_INT8_DOT:
        return _Torch(codes, scales, zeros, order).product
    from kernels.cpu.linear.int4 import PackedInt4

    parts = _split(codes.shape[1] // scales.shape[1])
    split_scales, split_zeros = (grouped.repeat_interleave(parts, 1) for grouped in (scales, zeros))
    return PackedInt4(codes, split_scales, split_zeros, order).product


class _Torch:
    """torch's operator, which takes activations in bfloat16."""

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None) -> None:
        self._rows, self._columns = codes.shape
        self._order, self._group = order, self._columns // scales.shape[1]
        more = -self._rows % _ROWS
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(F.pad(codes, (0, 0, 0, more)).int(), 1)
        # The operator takes (code - 8) * scale + offset.
        pairs = torch.stack((scales, (8 - zeros) * scales), dim=-1)
        self._scales = F.pad(pairs, (0, 0, 0, 0, 0, more)).transpose(0, 1).to(torch.bfloat16).contiguous()

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
