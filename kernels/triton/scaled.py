"""Products of 8-bit weights and 8-bit activations, with scales for rows and channels or for blocks of 128 inputs.

Transposed as in ``weight_only``. Sums of int8 products are exact. The matrix units add float8 products with few bits;
so each sum of 128, which with blocks is scaled too, is added to a float32 sum.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.split import count_parts, sum_parts


@triton.jit(do_not_specialize=["rows"])
def _scaled(
    X, ROW_SCALES, W, SCALES, BIAS, OUT, rows, out, into, steps,
    BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    is_output, is_row = n < out, m < rows
    is_int8: tl.constexpr = W.dtype.element_ty == tl.int8
    sums = tl.zeros([N, M], tl.int32 if is_int8 else tl.float32)
    total = tl.zeros([N, M], tl.float32)
    for step in range(part * steps, tl.minimum((part + 1) * steps, into // K)):
        k = step * K + tl.arange(0, K)
        x = tl.load(X + m.to(tl.int64)[None, :] * into + k[:, None], mask=is_row[None, :], other=0.0)
        weight = tl.load(W + n.to(tl.int64)[:, None] * into + k[None, :], mask=is_output[:, None], other=0.0)
        if BLOCKS:
            scale = tl.load(SCALES + (tl.program_id(0) * N // 128) * (into // 128) + step)
            row_scale = tl.load(ROW_SCALES + m * (into // 128) + step, mask=is_row, other=0.0)
            total += tl.dot(weight, x) * (row_scale * scale)[None, :]
        elif is_int8:
            sums = tl.dot(weight, x, sums, out_dtype=tl.int32)
        else:
            sums = tl.dot(weight, x, sums, max_num_imprecise_acc=K)
    if not BLOCKS:
        scale = tl.load(SCALES + n, mask=is_output, other=0.0).to(tl.float32)
        row_scale = tl.load(ROW_SCALES + m, mask=is_row, other=0.0)
        total = sums.to(tl.float32) * scale[:, None] * row_scale[None, :]
    if SPLIT:
        OUT += part.to(tl.int64) * rows * out
    elif HAS_BIAS:
        total += tl.load(BIAS + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    offset = m.to(tl.int64)[None, :] * out + n[:, None]
    tl.store(OUT + offset, total.to(OUT.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def scaled(
    x: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *,
    is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``x @ weight.T`` with scales and ``bias``, in ``dtype``.

    ``x``: ``[rows, in]`` of the type of ``weight`` ``[out,
    in]``. ``row_scales`` and ``scales``: ``[rows]`` and ``[out]``, or ``[rows, in / 128]`` and ``[ceil(out / 128), in /
    128]``. ``is_batch_invariant``: as in ``weight_only``.
    """
    (rows, into), out, blocks = x.shape, len(weight), scales.dim() == 2
    result = torch.empty(rows, out, dtype=dtype, device=x.device)
    if rows == 0:
        return result
    deep = math.gcd(into, 128)
    tall, wide, warps, stages = max(16, triton.next_power_of_2(rows)), 64, 4, 4
    if is_batch_invariant:
        tall = 64
    elif rows > 64:  # two sums need twice the registers
        tall, wide, warps, stages = 64 if blocks else 128, 128, 8, 3
    grid, steps = (triton.cdiv(out, wide), triton.cdiv(rows, tall)), into // deep
    parts = count_parts(x, grid[0] * (1 if is_batch_invariant else grid[1]), steps, 2)
    target = result if parts == 1 else torch.empty(parts, rows, out, dtype=torch.float32, device=x.device)
    _scaled[(*grid, parts)](
        x.contiguous(), row_scales.contiguous(), weight.contiguous(), scales.contiguous(),
        row_scales if bias is None else bias, target, rows, out, into, triton.cdiv(steps, parts),
        BLOCKS=blocks, HAS_BIAS=bias is not None, SPLIT=parts > 1,
        M=tall, N=wide, K=deep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        sum_parts(target, bias, result)
    return result
