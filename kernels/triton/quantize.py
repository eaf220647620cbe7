"""Quantization of vectors to int8 or float8 with a scale each, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.rounding import round_to_even

_TILE = 2048


@triton.jit(do_not_specialize=["rows"])
def _quantize(X, OUT, SCALES, rows, n, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    offset = row[:, None] * n + column
    inside = (row < rows)[:, None] & (column < n)
    x = tl.load(X + offset, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-20) / LIMIT
    tl.store(SCALES + row, scale, mask=row < rows)
    x = x / scale[:, None]
    if LIMIT == 127:
        x = round_to_even(x)
    tl.store(OUT + offset, x.to(OUT.dtype.element_ty), mask=inside)


def quantize_vectors(x: Tensor, dtype: torch.dtype, limit: float) -> tuple[Tensor, Tensor]:
    """``kernels.quantize.quantize_vectors`` of CUDA tensors; ``limit``: the largest number of ``dtype``."""
    x, n = x.contiguous(), x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        columns = triton.next_power_of_2(n)
        rows = max(1, _TILE // columns)
        _quantize[(triton.cdiv(scales.numel(), rows),)](
            x, out, scales, scales.numel(), n,
            LIMIT=limit, ROWS=rows, COLUMNS=columns, num_warps=min(16, max(1, rows * columns // 512)),
        )  # fmt: skip
    return out, scales
