"""Matrix products with 4-bit weights in groups."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_GROUPS = (32, 64, 128, 256)
_ROWS = 16
"""The operator wants a multiple of this."""


class Int4Linear:
    """``x @ ((codes - zeros) * scales).T + bias``, the activations in bfloat16, which is all that is rounded.

    An eighth of ``Linear``'s bytes. Faster than it up to 16 rows: with one row five times on a core that reads from
    memory, with four twice, and from 64 rows on a fifth slower. Each row of the result is, bit for bit, independent of
    the other rows.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        """``codes``: uint8 ``[out, in]`` of 0 … 15, ``scales`` and ``zeros``: float32 ``[out, groups]``. ``order``:
        int64 ``[in]``, the columns of ``x`` that the columns of ``codes`` belong to, where they are not in order.
        Raises ``ValueError`` where ``supported`` is false."""
        rows, columns = codes.shape
        self._group = columns // scales.shape[1]
        if not supported(columns, self._group):
            raise ValueError(f"groups of {self._group} of {columns} columns are not among {_GROUPS}")
        self.parameters = codes.numel() + (0 if bias is None else bias.numel())
        """Number of weights."""
        self.is_kernel = False
        """See ``Product``."""
        self._rows, self._bias, self._order = rows, bias, order
        more = -rows % _ROWS
        codes = F.pad(codes, (0, 0, 0, more)).int()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        # The operator takes (code - 8) * scale + offset.
        pairs = torch.stack((scales, (8 - zeros) * scales), dim=-1)
        self._scales = F.pad(pairs, (0, 0, 0, 0, 0, more)).transpose(0, 1).to(torch.bfloat16).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[rows, in]``. Returns ``[rows, out]``, float32."""
        if self._order is not None:
            x = x[:, self._order]
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self._packed, self._group, self._scales
        )
        result = out[:, : self._rows].float()
        return result if self._bias is None else result.add_(self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + self(x)``."""
        return self(x).add_(residual)


def supported(columns: int, group: int) -> bool:
    """Whether ``Int4Linear`` computes groups of that size."""
    return group in _GROUPS and columns % group == 0
