"""Quantization of vectors to int8 or float8 with a scale each, in one pass over memory.

Kernels that compute rows of activations quantize them by the same code before they are stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.quantization import Quantization

_TILE = 2048


@triton.jit
def round_to_even(x):
    """Round a float32 below 2**22 in magnitude to the nearest integer, ties to even, as ``torch.round``.

    Triton has no portable function for that.

    A sum with 1.5 * 2**23 has no bits left for a fraction, so it is rounded that way.
    """
    return (x.to(tl.float32) + 12582912.0) - 12582912.0


@triton.jit
def quantize_tile(x, LIMIT: tl.constexpr):
    """Return the codes, as float32, and the scales ``[vectors]`` of a tile ``[vectors, n]``, padded with zeros."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-20) / LIMIT
    x = x / scale[:, None]
    if LIMIT == 127:
        x = round_to_even(x)
    return x, scale


@triton.jit
def store_quantized(
    x, OUT, SCALES, offset, inside, row, rows, first, n,
    LIMIT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store ``x`` ``[ROWS, COLUMNS]``, zeros where not ``inside``, as codes with a scale for each ``SIZE`` columns.

    ``row``, ``first``: the first row and column of the tile in a matrix ``[rows, n]``; ``offset``: its places there.
    """
    GROUPS: tl.constexpr = COLUMNS // SIZE
    codes, scale = quantize_tile(tl.reshape(x, (ROWS * GROUPS, SIZE)), LIMIT)
    tl.store(OUT + offset, tl.reshape(codes, (ROWS, COLUMNS)).to(OUT.dtype.element_ty), mask=inside)
    index = tl.arange(0, ROWS * GROUPS)
    own, group, groups = row + index // GROUPS, first // SIZE + index % GROUPS, tl.cdiv(n, SIZE)
    tl.store(SCALES + own * groups + group, scale, mask=(own < rows) & (group < groups))


@triton.jit(do_not_specialize=["rows"])
def _quantize(X, OUT, SCALES, rows, n, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    offset = row[:, None] * n + column
    inside = (row < rows)[:, None] & (column < n)
    x = tl.load(X + offset, mask=inside, other=0.0).to(tl.float32)
    codes, scale = quantize_tile(x, LIMIT)
    tl.store(SCALES + row, scale, mask=row < rows)
    tl.store(OUT + offset, codes.to(OUT.dtype.element_ty), mask=inside)


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


def empty_codes(rows: int, n: int, quantization: Quantization, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return uninitialised codes ``[rows, n]`` and scales for rows to quantize."""
    shape = (rows,) if quantization.block is None else (rows, n // quantization.block)
    codes = torch.empty(rows, n, dtype=quantization.dtype, device=device)
    return codes, torch.empty(shape, dtype=torch.float32, device=device)
