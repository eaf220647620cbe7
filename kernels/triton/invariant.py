"""Products of unquantized weights in tiles of one size, added in one order, whatever the number of rows.

The libraries choose another kernel for another number of rows, and kernels add in different orders. Here each row of
the result is, bit for bit, a function of its own row of activations: tiles, the parts of split-K and the compiled code
depend on the weight alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.split import count_parts, sum_parts


# A number of rows that is 1 or a multiple of 16 would be compiled for itself.
@triton.jit(do_not_specialize=["rows"])
def _product(
    X, W, BIAS, OUT, rows, out, into, steps,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    is_output, is_row = n < out, m < rows
    x_rows, w_rows = X + m.to(tl.int64)[:, None] * into, W + n.to(tl.int64)[None, :] * into
    total = tl.zeros([M, N], tl.float32)
    for step in range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(into, K))):
        k = step * K + tl.arange(0, K)
        x = tl.load(x_rows + k[None, :], mask=is_row[:, None] & (k < into)[None, :], other=0.0)
        weight = tl.load(w_rows + k[:, None], mask=is_output[None, :] & (k < into)[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if SPLIT:
        OUT += part.to(tl.int64) * rows * out
    elif HAS_BIAS:
        total += tl.load(BIAS + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    offset = m.to(tl.int64)[:, None] * out + n[None, :]
    tl.store(OUT + offset, total.to(OUT.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x @ weight.T + bias`` in ``dtype`` for ``x`` ``[rows, in]`` and ``weight`` ``[out, in]`` of one type."""
    (rows, into), out = x.shape, len(weight)
    result = torch.empty(rows, out, dtype=dtype, device=x.device)
    if rows == 0:
        return result
    # Products of float32 are computed without matrix units, by many more registers.
    tall, wide, deep, stages = (64, 128, 64, 4) if x.dtype != torch.float32 else (32, 64, 32, 3)
    columns, steps = triton.cdiv(out, wide), triton.cdiv(into, deep)
    parts = count_parts(x, columns, steps, 1)
    target = result if parts == 1 else torch.empty(parts, rows, out, dtype=torch.float32, device=x.device)
    _product[(columns, triton.cdiv(rows, tall), parts)](
        x.contiguous(), weight.contiguous(), weight if bias is None else bias, target, rows, out, into,
        triton.cdiv(steps, parts),
        HAS_BIAS=bias is not None, SPLIT=parts > 1, M=tall, N=wide, K=deep, num_warps=4, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        sum_parts(target, bias, result)
    return result


# One code for every number of rows, as above.
@triton.jit(do_not_specialize=["rows"])
def _head_products(
    X, W, OUT, rows, out, into, x_token_stride, x_head_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    is_output, is_row = n < out, m < rows
    x_rows = X + m[:, None] * x_token_stride + head * x_head_stride
    columns = W + head * into * out + n[None, :]
    total = tl.zeros([M, N], tl.float32)
    for step in range(tl.cdiv(into, K)):
        k = step * K + tl.arange(0, K)
        x = tl.load(x_rows + k[None, :], mask=is_row[:, None] & (k < into)[None, :], other=0.0)
        weight = tl.load(columns + k[:, None] * out, mask=is_output[None, :] & (k < into)[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    offset = (head * rows + m[:, None]) * out + n[None, :]
    tl.store(OUT + offset, total.to(OUT.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def head_products(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``[heads, tokens, out]`` of ``x`` ``[tokens, heads, in]``, whose last axis has stride 1, and a ``weight``
    ``[heads, in, out]``."""
    (tokens, heads, into), out = x.shape, weight.shape[2]
    result = torch.empty(heads, tokens, out, dtype=x.dtype, device=x.device)
    if tokens:
        tall, wide, deep = (32, 64, 32) if x.dtype == torch.float32 else (64, 64, 64)
        _head_products[(triton.cdiv(out, wide), triton.cdiv(tokens, tall), heads)](
            x, weight, result, tokens, out, into, x.stride(0), x.stride(1), M=tall, N=wide, K=deep, num_warps=4
        )
    return result
