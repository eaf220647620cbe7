"""Products of 16-bit activations with 8-bit weights or 4-bit codes, which are converted to 16 bits in registers.

The product is computed transposed, weights first: the matrix units take 64 rows of their first operand and as few as 8
of the second, and read the first from registers, where the weights have just been converted. Codes are converted
without their scales, so 16 bits hold them exactly; the scale of a group is applied to the float32 sum of its products.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.triton.split import count_parts, sum_parts

BYTES, NF4 = 1, 2
"""Layouts. ``BYTES``: int8 or float8 ``[out, in]``. ``NF4``: uint8 ``[out, in / 2]``, high nibble first."""
DENSE_ROWS = 128
"""Rows from which the weight is dequantised once, into memory that the product returns to torch at its end, and
multiplied by the library, whose matrix products then gain more than the copy costs. It is rounded to ``x``'s dtype."""
INVARIANT_ROWS = 64
"""Rows of a tile where they must not depend on the number of rows."""


@triton.jit
def load_weight(
    W, CODES, n, is_output, step, w_stride,
    DTYPE: tl.constexpr, LAYOUT: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return the weights of a step without their scales and zeros: ``[N, K]``."""
    if LAYOUT == 1:
        k = step * K + tl.arange(0, K)
        q = tl.load(W + n.to(tl.int64)[:, None] * w_stride + k[None, :], mask=is_output[:, None], other=0.0)
        weight = q.to(DTYPE)
    else:
        pair = step * (K // 2) + tl.arange(0, K // 2)
        pairs = tl.load(W + n.to(tl.int64)[:, None] * w_stride + pair[None, :], mask=is_output[:, None], other=0)
        q = tl.interleave(pairs >> 4, pairs & 15)
        codes = tl.load(CODES + tl.arange(0, 16)).to(DTYPE)
        weight = tl.reshape(tl.gather(codes, tl.reshape(q, [N * K]).to(tl.int32), 0), [N, K])
    return weight


@triton.jit
def _dequantize(
    W, SCALES, ZEROS, CODES, OUT, out, into, group, w_stride,
    LAYOUT: tl.constexpr, HAS_ZEROS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write a tile of the weight, in the order in which its inputs are stored."""
    step = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    is_output = n < out
    dtype: tl.constexpr = OUT.dtype.element_ty
    codes: tl.constexpr = tl.float32 if LAYOUT == 2 else dtype
    weight = load_weight(W, CODES, n, is_output, step, w_stride, codes, LAYOUT, N, K).to(tl.float32)
    about = (step * K // group) * out + n
    if HAS_ZEROS:
        weight -= tl.load(ZEROS + about, mask=is_output, other=0.0).to(tl.float32)[:, None]
    weight *= tl.load(SCALES + about, mask=is_output, other=0.0).to(tl.float32)[:, None]
    k = step * K + tl.arange(0, K)
    tl.store(OUT + n.to(tl.int64)[:, None] * into + k[None, :], weight.to(dtype), mask=is_output[:, None])


@triton.jit(do_not_specialize=["rows"])
def _weight_only(
    X, W, SCALES, ZEROS, CODES, ORDER, BIAS, OUT, rows, out, into, group, x_stride, w_stride, steps,
    LAYOUT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    is_output = n < out
    dtype: tl.constexpr = X.dtype.element_ty
    x_rows = X + m.to(tl.int64)[None, :] * x_stride
    total = tl.zeros([N, M], tl.float32)
    for step in range(part * steps, tl.minimum((part + 1) * steps, into // K)):
        k = step * K + tl.arange(0, K)
        column = tl.load(ORDER + k) if HAS_ORDER else k
        x = tl.load(x_rows + column[:, None], mask=(m < rows)[None, :], other=0.0)
        scale = tl.load(SCALES + (step * K // group) * out + n, mask=is_output, other=0.0).to(tl.float32)
        weight = load_weight(W, CODES, n, is_output, step, w_stride, dtype, LAYOUT, N, K)
        products = tl.dot(weight, x, input_precision="ieee")
        if HAS_ZEROS:  # 16 bits do not hold every difference of a byte and a zero
            zero = tl.load(ZEROS + (step * K // group) * out + n, mask=is_output, other=0.0).to(tl.float32)
            products -= zero[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
        total += products * scale[:, None]
    inside = is_output[:, None] & (m < rows)[None, :]
    if SPLIT:
        OUT += part.to(tl.int64) * rows * out
    elif HAS_BIAS:
        total += tl.load(BIAS + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    tl.store(OUT + m.to(tl.int64)[None, :] * out + n[:, None], total.to(OUT.dtype.element_ty), mask=inside)


def weight_only(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, layout: int, *,
    zeros: Tensor | None = None, codes: Tensor | None = None, order: Tensor | None = None,
    dtype: torch.dtype | None = None, is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``x @ dequantized.T + bias`` for ``x`` ``[rows, in]``.

    ``scales``: ``[groups, out]``; ``zeros``: the same, floats, which bytes may have; ``codes``: float32 ``[16]``, for
    NF4; ``order``: int32 ``[in]``, the column of ``x`` that each input of the weight is. ``in`` is a multiple of the
    group size, and that of 16. ``dtype``: of the result, ``None`` for that of ``x``.
    ``is_batch_invariant``: choose tiles and parts by the weight alone, so that no row depends, to the bit, on others.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight, scales = weight.contiguous(), scales.contiguous()
    (rows, into), (groups, out) = x.shape, scales.shape
    group = into // groups
    result = torch.empty(rows, out, dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return result
    zeroed, codes = zeros is not None, scales if codes is None else codes
    zeros = scales if zeros is None else zeros.contiguous()
    if rows >= DENSE_ROWS and dtype in (None, x.dtype) and not is_batch_invariant:
        dense = torch.empty(out, into, dtype=x.dtype, device=x.device)
        deep = math.gcd(group, 128)
        _dequantize[(triton.cdiv(out, 64), into // deep)](
            weight, scales, zeros, codes, dense, out, into, group, weight.stride(0),
            LAYOUT=layout, HAS_ZEROS=zeroed, N=64, K=deep, num_warps=4,
        )  # fmt: skip
        return F.linear(x if order is None else x.index_select(1, order), dense, bias)
    tall, wide, deep, warps, stages = _choose_tiles(INVARIANT_ROWS if is_batch_invariant else rows, group)
    grid = triton.cdiv(out, wide), triton.cdiv(rows, tall)
    steps = into // deep
    parts = count_parts(x, grid[0] * (1 if is_batch_invariant else grid[1]), steps, 4)
    target = result if parts == 1 else torch.empty(parts, rows, out, dtype=torch.float32, device=x.device)
    _weight_only[(*grid, parts)](
        x, weight, scales, zeros, codes, weight if order is None else order, scales if bias is None else bias, target,
        rows, out, into, group, x.stride(0), weight.stride(0), triton.cdiv(steps, parts),
        LAYOUT=layout, HAS_ZEROS=zeroed, HAS_ORDER=order is not None, HAS_BIAS=bias is not None, SPLIT=parts > 1,
        M=tall, N=wide, K=deep, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        sum_parts(target, bias, result)
    return result


def _choose_tiles(rows: int, group: int) -> tuple[int, int, int, int, int]:
    """Return the rows, outputs and inputs of a tile, the warps and the pipeline stages."""
    if rows <= 64:
        return max(16, triton.next_power_of_2(rows)), 64, math.gcd(group, 128), 4, 4
    return 128, 128, math.gcd(group, 64), 8, 3
