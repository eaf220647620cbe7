"""Products of 16-bit activations with 4-bit or 8-bit weights, which are converted to 16 bits in registers.

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

INT4, BYTES, NF4 = 0, 1, 2
"""Layouts. ``INT4``: int32 ``[in / 8, out]``, the nibbles of a word are consecutive inputs. ``BYTES``: int8 or float8
``[out, in]``. ``NF4``: uint8 ``[out, in / 2]``, high nibble first."""


_UNIT = 0x4B000000
"""The bits of 2**23 in float32, whose last place is worth 1."""
_DENSE_ROWS = 128
"""Rows from which the weight is dequantised once, into memory that the product returns to torch at its end, and
multiplied by the library, whose matrix products then gain more than the copy costs. It is rounded to ``x``'s dtype."""
_INVARIANT_ROWS = 64
"""Rows of a tile where they must not depend on the number of rows."""


@triton.jit
def unpack_nibbles(words):
    """Return the nibbles of words ``[rows, columns]``, lowest first: ``[rows, 8 * columns]``."""
    x = tl.interleave(words, words >> 16)
    x = tl.interleave(x, x >> 8)
    return tl.interleave(x, x >> 4) & 15


@triton.jit
def _subtract_zero(q, zero, DTYPE: tl.constexpr):
    """Return ``q - zero`` as floats, for integers from 0 to 15, without a conversion.

    The integer is or-ed into the last bits of a power of two whose last place is worth 1; the difference with the same
    power is exact.
    """
    if tl.bfloat16 == DTYPE:
        centred = (q | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - (zero + 128).to(tl.bfloat16)
    elif tl.float16 == DTYPE:
        centred = (q | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (zero + 1024).to(tl.float16)
    else:
        centred = (q | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608).to(tl.float32)
    return centred


@triton.jit
def load_weight(
    W, ZEROS, CODES, n, is_output, step, group, out, w_stride,
    DTYPE: tl.constexpr, LAYOUT: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return the weights of a step without their scales, and in ``BYTES`` without their zeros: ``[N, K]``."""
    if LAYOUT == 0:
        word = step * (K // 8) + tl.arange(0, K // 8)
        words = tl.load(W + word[None, :] * w_stride + n[:, None], mask=is_output[:, None], other=0)
        zero = tl.load(ZEROS + (step * K // group) * out + n, mask=is_output, other=0).to(tl.int32)
        weight = _subtract_zero(unpack_nibbles(words), zero[:, None], DTYPE)
    elif LAYOUT == 1:
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
    weight = load_weight(W, ZEROS, CODES, n, is_output, step, group, out, w_stride, codes, LAYOUT, N, K).to(tl.float32)
    about = (step * K // group) * out + n
    if LAYOUT == 1 and HAS_ZEROS:
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
        weight = load_weight(W, ZEROS, CODES, n, is_output, step, group, out, w_stride, dtype, LAYOUT, N, K)
        products = tl.dot(weight, x, input_precision="ieee")
        if LAYOUT == 1 and HAS_ZEROS:  # 16 bits do not hold every difference of a byte and a zero
            zero = tl.load(ZEROS + (step * K // group) * out + n, mask=is_output, other=0.0).to(tl.float32)
            products -= zero[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
        total += products * scale[:, None]
    inside = is_output[:, None] & (m < rows)[None, :]
    if SPLIT:
        OUT += part.to(tl.int64) * rows * out
    elif HAS_BIAS:
        total += tl.load(BIAS + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    tl.store(OUT + m.to(tl.int64)[None, :] * out + n[:, None], total.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _int4_vector(
    X, W, SCALES, ZEROS, ORDER, OUT, out, into, group, w_stride, steps, unit,
    HAS_ORDER: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute the product of one row without the matrix units, which would multiply mostly zeros.

    The codes are not shifted to the lowest bits, as each instruction counts: the j-th of 16 bits is or-ed in its place
    into ``unit`` and is 16**j times too large, by which its activation is divided. ``unit`` is an argument, as an
    instruction takes one constant.
    """
    part = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    is_output = n < out
    total = tl.zeros([K // 8, N], tl.float32)
    for step in tl.range(part * steps, tl.minimum((part + 1) * steps, into // K), num_stages=4):
        scale = tl.load(SCALES + (step * K // group) * out + n, mask=is_output, other=0.0).to(tl.float32)
        zero = tl.load(ZEROS + (step * K // group) * out + n, mask=is_output, other=0).to(tl.int32)
        word = step * (K // 8) + tl.arange(0, K // 8)
        words = tl.load(W + word[:, None] * w_stride + n[None, :], mask=is_output[None, :], other=0)
        sums = tl.zeros([K // 8, N], tl.float32)
        for nibble in tl.static_range(8):
            column = tl.load(ORDER + word * 8 + nibble) if HAS_ORDER else word * 8 + nibble
            x = tl.load(X + column).to(tl.float32) * 2.0 ** (-4 * (nibble % 4))
            code = (words >> (16 * (nibble // 4))) & (15 << (4 * (nibble % 4)))
            number = (code | unit).to(tl.float32, bitcast=True)
            offset = ((zero << (4 * (nibble % 4))) | unit).to(tl.float32, bitcast=True)
            sums += (number - offset[None, :]) * x[:, None]
        total += sums * scale[None, :]
    tl.store(OUT + part.to(tl.int64) * out + n, tl.sum(total, axis=0), mask=is_output)


def weight_only(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, layout: int, *,
    zeros: Tensor | None = None, codes: Tensor | None = None, order: Tensor | None = None,
    dtype: torch.dtype | None = None, is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``x @ dequantized.T + bias`` for ``x`` ``[rows, in]``.

    ``scales``: ``[groups, out]``; ``zeros``: the same, uint8 for 4-bit integers, floats for bytes, which may have none;
    ``codes``: float32 ``[16]``, for NF4; ``order``: int32 ``[in]``, the column of ``x`` that each input of the weight
    is. ``in`` is a multiple of the group size, and that of 16. ``dtype``: of the result, ``None`` for that of ``x``.
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
    if rows == 1 and layout == INT4 and not is_batch_invariant:
        wide, deep = 128, math.gcd(group, 128)
        columns, steps = triton.cdiv(out, wide), into // deep
        parts = count_parts(x, columns, steps, 8)
        partial = torch.empty(parts, 1, out, dtype=torch.float32, device=x.device)
        _int4_vector[(columns, parts)](
            x, weight, scales, zeros, weight if order is None else order, partial, out, into, group,
            weight.stride(0), triton.cdiv(steps, parts), _UNIT,
            HAS_ORDER=order is not None, N=wide, K=deep, num_warps=4,
        )  # fmt: skip
        sum_parts(partial, bias, result)
        return result
    if rows >= _DENSE_ROWS and dtype in (None, x.dtype) and not is_batch_invariant:
        dense = torch.empty(out, into, dtype=x.dtype, device=x.device)
        deep = math.gcd(group, 128)
        _dequantize[(triton.cdiv(out, 64), into // deep)](
            weight, scales, zeros, codes, dense, out, into, group, weight.stride(0),
            LAYOUT=layout, HAS_ZEROS=zeroed, N=64, K=deep, num_warps=4,
        )  # fmt: skip
        return F.linear(x if order is None else x.index_select(1, order), dense, bias)
    tall, wide, deep, warps, stages = _choose_tiles(_INVARIANT_ROWS if is_batch_invariant else rows, group)
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
