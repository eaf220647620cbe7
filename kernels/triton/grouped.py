"""Products of rows that are sorted by expert with the 4-bit weights of all experts, in one kernel.

The boundaries of the experts' rows are on the device: a program finds its expert and rows by them, so that the host
never waits for the router. The grid has room for one tile of each expert that is not full; programs without rows
return.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.weight_only import load_weight

_FEW_ROWS = 16
"""Rows of a tile where an expert has few; with more, or where rows must not depend on their number, it is one size."""


@triton.jit
def _grouped(
    X, W, SCALES, CODES, BIAS, ENDS, OUT, out, into, group, experts,
    HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    index = tl.arange(0, EXPERTS)
    ends = tl.load(ENDS + index, mask=index < experts, other=0)
    starts = tl.load(ENDS + index - 1, mask=(index > 0) & (index < experts), other=0)
    tiles = tl.where(index < experts, (ends - starts + M - 1) // M, 0)
    last = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last <= tile).to(tl.int32), axis=0)
    if expert >= experts:
        return
    is_own = index == expert
    own_tile = tile - tl.sum(tl.where(is_own, last - tiles, 0), axis=0)
    m = tl.sum(tl.where(is_own, starts, 0), axis=0) + own_tile * M + tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    is_row, is_output = m < tl.sum(tl.where(is_own, ends, 0), axis=0), n < out
    dtype: tl.constexpr = X.dtype.element_ty
    W += expert.to(tl.int64) * out * (into // 2)
    SCALES += expert.to(tl.int64) * out * (into // group)
    x_rows = X + m.to(tl.int64)[None, :] * into
    total = tl.zeros([N, M], tl.float32)
    for step in range(into // K):
        k = step * K + tl.arange(0, K)
        x = tl.load(x_rows + k[:, None], mask=is_row[None, :], other=0.0)
        scale = tl.load(SCALES + (step * K // group) * out + n, mask=is_output, other=0.0).to(tl.float32)
        weight = load_weight(W, CODES, n, is_output, step, into // 2, dtype, 2, N, K)
        total += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
    if HAS_BIAS:
        total += tl.load(BIAS + expert.to(tl.int64) * out + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    target = OUT + m.to(tl.int64)[None, :] * out + n[:, None]
    tl.store(target, total.to(OUT.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def grouped(
    x: Tensor, packed: Tensor, scales: Tensor, codes: Tensor, bias: Tensor | None, ends: Tensor, *,
    is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """``kernels.linear.nf4.grouped_nf4_linear`` of CUDA tensors. ``codes``: float32 ``[16]``."""
    x = x.contiguous()
    (rows, into), (experts, groups, out) = x.shape, scales.shape
    group = into // groups
    result = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    if rows:
        tall = _FEW_ROWS if rows <= _FEW_ROWS * experts and not is_batch_invariant else 4 * _FEW_ROWS
        _grouped[(triton.cdiv(out, 64), triton.cdiv(rows, tall) + min(experts, rows))](
            x, packed.contiguous(), scales.contiguous(), codes, scales if bias is None else bias, ends, result, out,
            into, group, experts,
            HAS_BIAS=bias is not None, EXPERTS=triton.next_power_of_2(experts), M=tall, N=64, K=math.gcd(group, 128),
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return result
