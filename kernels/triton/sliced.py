"""Products of 16-bit activations with 4-bit weights that are loaded where the matrix units read them.

Weights are stored in blocks of four slices of inputs; a half word has one input of each slice. So a slice of the weight
is a tile that each thread makes from the half words that it has loaded, in the order in which the matrix units take
their first operand, weights first as in ``weight_only``: nothing is exchanged between threads, and two neighbouring
weights are unpacked by a shift, one logical instruction and a subtraction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.jit import JITFunction

from kernels.triton.split import count_parts, sum_parts
from kernels.triton.weight_only import DENSE_ROWS, INVARIANT_ROWS

_OUTPUTS = 64
"""Outputs of a tile."""
_FEW_ROWS = 4
"""Rows up to which parts are many: their sums are small beside the weight."""
_PAIRS = "{{ .reg .b32 t; shr.u32 t, $1, {shift}; lop3.b32 $0, t, 0x000f000f, {unit}, 0xea; }}"
"""Takes the codes of two neighbouring half words and or-s them into a power of two whose last place is worth 1."""
_BF16_PAIRS = tl.constexpr(tuple(_PAIRS.format(shift=4 * slice, unit="0x43004300") for slice in range(4)))
_FP16_PAIRS = tl.constexpr(tuple(_PAIRS.format(shift=4 * slice, unit="0x64006400") for slice in range(4)))


@triton.jit
def _take_slice(halves, zero, SLICE: tl.constexpr, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Return ``code - zero`` of a slice as floats, ``[N, K]``, exactly, without a conversion.

    The code is or-ed into the last bits of a power of two whose last place is worth 1, and the zero added to the same
    power subtracted. ``zero``: int32 ``[N]``.
    """
    if IN_PAIRS and tl.bfloat16 == DTYPE:
        number = tl.inline_asm_elementwise(_BF16_PAIRS[SLICE], "=r,r", [halves], tl.bfloat16, is_pure=True, pack=2)
        offset = (zero + 128).to(tl.bfloat16)
    elif IN_PAIRS and tl.float16 == DTYPE:
        number = tl.inline_asm_elementwise(_FP16_PAIRS[SLICE], "=r,r", [halves], tl.float16, is_pure=True, pack=2)
        offset = (zero + 1024).to(tl.float16)
    elif tl.bfloat16 == DTYPE:
        number = ((halves >> (4 * SLICE)) & 15 | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        offset = (zero + 128).to(tl.bfloat16)
    elif tl.float16 == DTYPE:
        number = ((halves >> (4 * SLICE)) & 15 | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
        offset = (zero + 1024).to(tl.float16)
    else:
        number = ((halves.to(tl.int32) >> (4 * SLICE)) & 15 | 0x4B000000).to(tl.float32, bitcast=True)
        offset = (zero + 8388608).to(tl.float32)
    return number - offset[:, None]


@triton.jit(do_not_specialize=["rows"])
def _sliced(
    X, W, SCALES, ZEROS, ORDER, BIAS, OUT, rows, out, into, group, x_stride, steps,
    IN_PAIRS: tl.constexpr, ONE_GROUP: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """``ONE_GROUP``: the inputs of a block have one scale, which is applied to their sum; else each slice has one."""
    part = tl.program_id(2)
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    k = tl.arange(0, K)
    is_output, is_row = n < out, m < rows
    dtype: tl.constexpr = X.dtype.element_ty
    x_rows = X + m.to(tl.int64)[None, :] * x_stride
    total = tl.zeros([N, M], tl.float32)
    for block in range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(into, 4 * K))):
        start = (block * out + n.to(tl.int64)) * K
        halves = tl.load(W + start[:, None] + k[None, :], mask=is_output[:, None], other=0)
        sums = tl.zeros([N, M], tl.float32)
        for part_of_block in tl.static_range(4):
            first = (4 * block + part_of_block) * K
            # Blocks of one group are full, so that their loads need no mask for the inputs.
            is_x, is_scale = is_row[None, :], is_output
            if not ONE_GROUP:
                is_x, is_scale = is_x & (first < into), is_scale & (first < into)
            column = first + k
            if HAS_ORDER:
                column = tl.load(ORDER + column, mask=column < into, other=0)
            x = tl.load(x_rows + column[:, None], mask=is_x, other=0.0)
            if part_of_block == 0 or not ONE_GROUP:
                about = (first // group) * out + n
                zero = tl.load(ZEROS + about, mask=is_scale, other=0).to(tl.int32)
                scale = tl.load(SCALES + about, mask=is_scale, other=0.0).to(tl.float32)
            weight = _take_slice(halves, zero, part_of_block, dtype, IN_PAIRS)
            if ONE_GROUP:
                sums = tl.dot(weight, x, sums, input_precision="ieee")
            else:
                total += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
        if ONE_GROUP:
            total += sums * scale[:, None]
    if SPLIT:
        OUT += part.to(tl.int64) * rows * out
    elif HAS_BIAS:
        total += tl.load(BIAS + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    target = OUT + m.to(tl.int64)[None, :] * out + n[:, None]
    tl.store(target, total.to(OUT.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


@triton.jit
def _dequantize_slices(
    W, SCALES, ZEROS, OUT, out, into, group, IN_PAIRS: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """Write a block of the weight, in the order in which its inputs are stored."""
    block = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    is_output = n < out
    start = (block * out + n.to(tl.int64)) * K
    halves = tl.load(W + start[:, None] + k[None, :], mask=is_output[:, None], other=0)
    for part_of_block in tl.static_range(4):
        first = (4 * block + part_of_block) * K
        inside = is_output & (first < into)
        about = (first // group) * out + n
        zero = tl.load(ZEROS + about, mask=inside, other=0).to(tl.int32)
        scale = tl.load(SCALES + about, mask=inside, other=0.0).to(tl.float32)
        weight = _take_slice(halves, zero, part_of_block, OUT.dtype.element_ty, IN_PAIRS).to(tl.float32)
        target = OUT + n.to(tl.int64)[:, None] * into + first + k[None, :]
        tl.store(target, (weight * scale[:, None]).to(OUT.dtype.element_ty), mask=inside[:, None])


_IN_PAIRS = isinstance(_sliced, JITFunction)
"""Triton's interpreter runs no assembler, and takes each code out alone."""


def sliced(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, *,
    order: Tensor | None = None, dtype: torch.dtype | None = None, is_batch_invariant: bool = False,
    group: int,
) -> Tensor:  # fmt: skip
    """Return ``x @ dequantized.T + bias`` for ``x`` ``[rows, in]``.

    The weight is ``kernels.linear.weight_only_int4.Int4``, with groups of ``group`` inputs, a multiple of the size of
    a slice. ``dtype``: of the result, ``None`` for that of ``x``. ``is_batch_invariant``: as in ``weight_only``.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    (rows, into), (blocks, out, size) = x.shape, packed.shape
    result = torch.empty(rows, out, dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return result
    if rows >= DENSE_ROWS and dtype in (None, x.dtype) and not is_batch_invariant:
        dense = torch.empty(out, into, dtype=x.dtype, device=x.device)
        _dequantize_slices[(triton.cdiv(out, _OUTPUTS), blocks)](
            packed, scales, zeros, dense, out, into, group, IN_PAIRS=_IN_PAIRS, N=_OUTPUTS, K=size, num_warps=4
        )
        return F.linear(x if order is None else x.index_select(1, order), dense, bias)
    tall = INVARIANT_ROWS if is_batch_invariant else min(64, max(16, triton.next_power_of_2(rows)))
    grid = triton.cdiv(out, _OUTPUTS), triton.cdiv(rows, tall)
    resident = 8 if rows <= _FEW_ROWS and not is_batch_invariant else 4
    parts = count_parts(x, grid[0] * (1 if is_batch_invariant else grid[1]), blocks, resident)
    target = result if parts == 1 else torch.empty(parts, rows, out, dtype=torch.float32, device=x.device)
    _sliced[(*grid, parts)](
        x, packed, scales, zeros, packed if order is None else order, scales if bias is None else bias, target,
        rows, out, into, group, x.stride(0), triton.cdiv(blocks, parts),
        IN_PAIRS=_IN_PAIRS, ONE_GROUP=group % (4 * size) == 0, HAS_ORDER=order is not None,
        HAS_BIAS=bias is not None, SPLIT=parts > 1, M=tall, N=_OUTPUTS, K=size,
        num_warps=2 if tall == 16 and x.element_size() == 2 else 4, num_stages=4,
    )  # fmt: skip
    if parts > 1:
        sum_parts(target, bias, result)
    return result
