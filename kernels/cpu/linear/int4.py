"""Matrix products with 4-bit weights in groups of columns, and rows rounded to 8 bits by groups as they are packed.

``weight = (code - zero) * scale`` with a scale and a zero for each group of an output, ``x = code * unit`` with a unit
for each group of a row. A panel has for each group its scales ``[WIDE]``, its zeros ``[WIDE]`` and its codes ``[size /
8][WIDE][4]``: a byte holds a code and, in its upper half, that of the column 4 further on. Within a group the sum of
the products of codes is an exact integer, whose initial value accounts for the zeros. A result is a chain of fused
multiply-adds of these integers in the order of the groups, whatever the number of rows or threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import HAS_SIGNED_DOT, LANES
from kernels.cpu.linear.gemm_tile import CACHE_LINE, VECTORS, WIDE, dot, fence, sum_tile, write_tile
from kernels.cpu.linear.packed_weights import PackedWeights, product_body
from kernels.cpu.linear.rounding import LEVELS, PREFETCH_PER_STEP, STEP, codes_writer, largest
from kernels.cpu.runtime.kernel import float32_array, function, int64_array, kernel, read_arguments
from kernels.cpu.runtime.memory import allocate_resident
from kernels.cpu.simd.llvm_ir import (
    FLOAT,
    I32,
    I64,
    call_intrinsic,
    constant,
    fused_multiply_add,
    generate_loop,
    pointer_at,
    splat_value,
)

_MIN_PARALLEL = 1 << 20
"""With fewer products one thread is done before a second one has started."""
_TALL = {16: 8, 8: 4, 4: 4}[LANES]
"""Rows of a tile: their integer sums and results and the weights, packed and unpacked, share the registers. With 32
registers, more rows gain more than is lost when results wait in memory at the end of a group (ARM has as many: by the
number of instructions)."""
_write_codes = codes_writer(0)


class PackedInt4(PackedWeights):
    """A weight ``(codes - zeros) * scales``.

    ``codes``: uint8 ``[out, in]`` of 0 … 15; ``scales`` and ``zeros``: float32 ``[out, groups]``, the zeros whole
    numbers. A group has ``STEP`` to 256 columns, a multiple of ``STEP``.
    """

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None) -> None:
        """Keeps no reference to ``codes``. ``order``: int64 ``[in]``, the column of x of each column of ``codes``."""
        out, into = codes.shape
        groups, panels = scales.shape[1], -(-out // WIDE)
        size = into // groups
        num_padded = panels * WIDE - out
        # In words of 32 bits.
        words = allocate_resident(panels * groups * (3 * WIDE // 2 + size // 8 * WIDE)).view(panels, groups, -1)
        words[..., :WIDE] = _in_panels(scales, num_padded)
        words[..., WIDE : 3 * WIDE // 2].view(torch.int16).copy_(_in_panels(zeros, num_padded))
        halves = F.pad(codes, (0, 0, 0, num_padded)).view(panels, WIDE, groups, size // 8, 2, 4)
        packed = halves[..., 0, :] + 16 * halves[..., 1, :]
        inside = words[..., 3 * WIDE // 2 :].view(torch.uint8).view(panels, groups, size // 8, WIDE, 4)
        inside.copy_(packed.permute(0, 2, 3, 1, 4))
        own = torch.tensor([groups, size // STEP, 0 if order is None else 1])
        own = own if order is None else torch.cat((own, order))
        # For a row: its codes, the unit and the sum of each group, and its numbers in the order of ``codes``.
        row = into + 8 * groups + (0 if order is None else 4 * into)
        super().__init__(_product, "int4", codes.shape, words, own, row=row, min_parallel=_MIN_PARALLEL)


def _in_panels(grouped: Tensor, num_padded: int) -> Tensor:
    """Reshape ``[out, groups]`` to ``[panels, groups, WIDE]``."""
    return F.pad(grouped, (0, 0, 0, num_padded)).view(-1, WIDE, grouped.shape[1]).transpose(1, 2)


@function
def _pack(to: int, x: int, rows: int, into: int, stride: int, own: int, ahead: int) -> None:
    """Write for each group the units of the rows, the negated sums of their codes, and the codes."""
    shape = int64_array(own, (3,))
    groups, size, has_order = shape[0], STEP * shape[1], shape[2]
    group_bytes = rows * (8 + size)
    for row in range(rows):
        source = x + 4 * row * stride
        if has_order:
            order, unordered = int64_array(own + 24, (into,)), float32_array(source, (into,))
            source = to + groups * group_bytes
            ordered = float32_array(source, (into,))
            for i in range(into):
                ordered[i] = unordered[order[i]]
        for group in range(groups):
            start, part = to + group * group_bytes, source + 4 * group * size
            limit = largest(part, size)
            codes = start + 8 * rows + STEP * row
            factor = types.float32(LEVELS) / limit
            prefetched = ahead + PREFETCH_PER_STEP * (into * row + group * size) // STEP
            total = _write_codes(codes, STEP * rows, part, size, factor, prefetched)
            row_values = float32_array(start, (2, rows))
            row_values[0, row] = limit / types.float32(LEVELS)
            row_values[1, row] = np.int32(-total).view(np.float32)


_I16 = ir.IntType(16)
_SUMS, _VECTOR, _SHORTS = (ir.VectorType(kind, LANES) for kind in (I32, FLOAT, _I16))


def _generate_tile(builder: Any, rows: int, target: Any, x: Any, panel: Any, own: Any, prefetching: Any) -> None:
    """Generate the product of a block of ``rows`` rows and a panel, group by group."""
    ahead, prefetch_stride = prefetching
    groups, steps = (builder.load(pointer_at(builder, own, offset, I64)) for offset in (0, 8))
    x_bytes = builder.add(I64(8 * rows), builder.mul(steps, I64(STEP * rows)))
    panel_bytes = builder.add(I64(6 * WIDE), builder.mul(steps, I64(STEP // 2 * WIDE)))

    def add_group(_index: Any, values: Any) -> Any:
        from_x, from_panel, *totals = values
        read = builder.sub(from_panel, panel)
        prefetched = builder.sdiv(builder.mul(read, prefetch_stride), I64(CACHE_LINE))
        group_prefetching = builder.add(ahead, prefetched), prefetch_stride
        totals = _add_group(builder, totals, from_x, from_panel, steps, group_prefetching)
        return [builder.add(from_x, x_bytes), builder.add(from_panel, panel_bytes), *totals]

    zeros = [_VECTOR(None)] * (rows * VECTORS)
    write_tile(builder, generate_loop(builder, groups, [x, panel, *zeros], add_group)[2:], target)


def _add_group(builder: Any, totals: Any, from_x: Any, from_panel: Any, steps: Any, prefetching: Any) -> Any:
    """Generate the sums of ``totals`` ``[rows, VECTORS]`` and the products of one group."""
    rows, low, four = len(totals) // VECTORS, constant(0x0F0F0F0F, _SUMS), constant(4, _SUMS)

    def load_for_outputs(offset: int, kind: Any) -> Any:
        size = 4 if kind is _VECTOR else 2
        pointers = (pointer_at(builder, from_panel, offset + size * v * LANES, kind) for v in range(VECTORS))
        return [builder.load(pointer, align=4) for pointer in pointers]

    def splat_for_row(offset: int, kind: Any) -> Any:
        return splat_value(builder, builder.load(pointer_at(builder, from_x, offset, kind.element), align=2), kind)

    zeros = [builder.zext(short, _SUMS) for short in load_for_outputs(4 * WIDE, _SHORTS)]
    row_sums = [splat_for_row(4 * (rows + row), _SUMS) for row in range(rows)]
    sums = sum_tile(
        builder,
        [_multiply_low_halves(builder, zero, row_sum) for row_sum in row_sums for zero in zeros],
        builder.add(from_x, I64(8 * rows)),
        builder.add(from_panel, I64(6 * WIDE)),
        steps,
        prefetching,
        lambda value, column, total: dot(builder, total, column, value, bits=4),
        lambda loaded: [builder.and_(loaded, low), builder.and_(builder.lshr(loaded, four), low)],
        min_prefetch_rows=1,
    )
    results, scales = [], load_for_outputs(0, _VECTOR)
    for row in range(rows):
        unit = splat_for_row(4 * row, _VECTOR)
        for v, scale in enumerate(scales):
            index = row * VECTORS + v
            scaled = fence(builder, builder.fmul(builder.sitofp(sums[index], _VECTOR), scale))
            results.append(fused_multiply_add(builder, scaled, unit, totals[index]))
    return results


def _multiply_low_halves(builder: Any, zero: Any, total: Any) -> Any:
    """Multiply the lower halves of two vectors of words; the upper halves of ``zero`` are 0."""
    if HAS_SIGNED_DOT:
        return builder.mul(zero, total)  # the same number: a sum of codes is at most 127 * 256
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    zero_halves, total_halves = (builder.bitcast(words, ir.VectorType(_I16, 2 * LANES)) for words in (zero, total))
    return call_intrinsic(builder, name, _SUMS, zero_halves, total_halves)


_body = product_body("int4", _pack, _generate_tile, _TALL)


@kernel
def _product(address: Any) -> None:
    _body(*read_arguments(address))
