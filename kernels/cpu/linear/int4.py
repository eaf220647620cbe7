"""Matrix products with 4-bit weights in groups of columns, and rows whose groups are rounded to 8 bits on their way in.

``weight = (code - zero) * scale`` with a scale and a zero for each group of an output, ``x = code * unit`` with a unit
for each group of a row. A panel is ``[groups]`` times its scales ``[WIDE]``, its zeros ``[WIDE]`` and its codes ``[size
/ 8][WIDE][4]``: a byte holds a code and, in its high half, that of the column 4 further on. Within a group the sum of
the products of codes is an exact integer, which begins at what the zeros take away. A result is a chain of fused
multiplications and additions of these integers in the order of the groups, whatever the number of rows or threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import LANES
from kernels.cpu.linear.gemm_tile import LINE, VECTORS, WIDE, at, broadcast, dot, external, fence, tile, write
from kernels.cpu.linear.packed_weights import Panels, product_body
from kernels.cpu.linear.rounding import ASKED, LEVELS, STEP, codes_writer, largest
from kernels.cpu.runtime.kernel import float32_array, function, int64_array, kernel, read_arguments
from kernels.cpu.runtime.memory import resident

_ALONE = 1 << 20
"""Products that one thread computes before two would have begun."""
_TALL = {16: 8, 8: 4}.get(LANES, 1)
"""Rows of a tile, whose integers and results, the weights as they lie and as they are multiplied share the registers.
With twice 16 more vectors, more rows gain more than is lost where a group ends and results wait in memory."""
_write_codes = codes_writer(0)


class Int4Panels(Panels):
    """``(codes - zeros) * scales`` of codes 0 … 15, uint8 ``[out, in]``, and float32 ``[out, groups]``, the zeros whole
    numbers. A group is of ``STEP`` to 256 columns, a multiple of ``STEP``."""

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None) -> None:
        """Keeps no reference to ``codes``. ``order``: int64 ``[in]``, the columns of x that those of ``codes`` belong
        to, where they are others."""
        out, into = codes.shape
        groups, panels = scales.shape[1], -(-out // WIDE)
        size = into // groups
        missing = panels * WIDE - out
        # In words of 32 bits.
        words = resident(panels * groups * (3 * WIDE // 2 + size // 8 * WIDE)).view(panels, groups, -1)
        words[..., :WIDE] = _in_panels(scales, missing)
        words[..., WIDE : 3 * WIDE // 2].view(torch.int16).copy_(_in_panels(zeros, missing))
        halves = F.pad(codes, (0, 0, 0, missing)).view(panels, WIDE, groups, size // 8, 2, 4)
        packed = halves[..., 0, :] + 16 * halves[..., 1, :]
        inside = words[..., 3 * WIDE // 2 :].view(torch.uint8).view(panels, groups, size // 8, WIDE, 4)
        inside.copy_(packed.permute(0, 2, 3, 1, 4))
        own = torch.tensor([groups, size // STEP, 0 if order is None else 1])
        own = own if order is None else torch.cat((own, order))
        # Of a row its codes, the unit and the sum of each group, and all of it in order.
        row = into + 8 * groups + (0 if order is None else 4 * into)
        super().__init__(_product, "int4", codes.shape, words, own, row=row, alone=_ALONE)


def _in_panels(grouped: Tensor, missing: int) -> Tensor:
    """``[out, groups]`` as ``[panels, groups, WIDE]``."""
    return F.pad(grouped, (0, 0, 0, missing)).view(-1, WIDE, grouped.shape[1]).transpose(1, 2)


@function
def _pack(to: int, x: int, rows: int, into: int, stride: int, own: int, ahead: int) -> None:
    """For each group its unit in each row, the sums of the codes with the other sign, and the codes."""
    about = int64_array(own, (3,))
    groups, size = about[0], STEP * about[1]
    whole = rows * (8 + size)
    for row in range(rows):
        source = x + 4 * row * stride
        if about[2]:
            order, plain, sorted_ = int64_array(own + 24, (into,)), float32_array(source, (into,)), to + groups * whole
            ordered = float32_array(sorted_, (into,))
            for i in range(into):
                ordered[i] = plain[order[i]]
            source = sorted_
        for group in range(groups):
            start, part = to + group * whole, source + 4 * group * size
            most = largest(part, size)
            codes = start + 8 * rows + STEP * row
            factor, asked = types.float32(LEVELS) / most, ahead + ASKED * (into * row + group * size) // STEP
            total = _write_codes(codes, STEP * rows, part, size, factor, asked)
            about_rows = float32_array(start, (2, rows))
            about_rows[0, row] = most / types.float32(LEVELS)
            about_rows[1, row] = np.int32(-total).view(np.float32)


_I16, _I64 = ir.IntType(16), ir.IntType(64)
_SUMS, _VECTOR, _SHORTS = (ir.VectorType(kind, LANES) for kind in (ir.IntType(32), ir.FloatType(), _I16))


def _tile(builder: Any, rows: int, target: Any, x: Any, panel: Any, own: Any, fetch: Any) -> None:
    fma = external(builder, f"llvm.fma.v{LANES}f32", ir.FunctionType(_VECTOR, [_VECTOR] * 3))
    low = ir.Constant(_SUMS, [0x0F0F0F0F] * LANES)
    four = ir.Constant(_SUMS, [4] * LANES)
    ahead, apart = fetch
    groups, steps = (builder.load(at(builder, own, offset, _I64)) for offset in (0, 8))
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    left, from_x, from_panel = (builder.phi(_I64) for _ in range(3))
    held = [builder.phi(_VECTOR) for _ in range(rows * VECTORS)]

    def of_outputs(offset: int, kind: Any) -> Any:
        size = 4 if kind is _VECTOR else 2
        return [builder.load(at(builder, from_panel, offset + size * v * LANES, kind), align=4) for v in range(VECTORS)]

    def of_row(offset: int, kind: Any) -> Any:
        return builder.load(at(builder, from_x, offset, kind), align=2)

    zeros = [builder.zext(short, _SUMS) for short in of_outputs(4 * WIDE, _SHORTS)]
    begun = []
    for row in range(rows):
        total = broadcast(builder, of_row(4 * (rows + row), _SUMS.element))
        begun += [_of_zeros(builder, zero, total) for zero in zeros]
    sums = tile(
        builder,
        begun,
        builder.add(from_x, _I64(8 * rows)),
        builder.add(from_panel, _I64(6 * WIDE)),
        steps,
        (builder.add(ahead, builder.sdiv(builder.mul(builder.sub(from_panel, panel), apart), _I64(LINE))), apart),
        lambda value, column, held: dot(builder, held, column, value),
        lambda loaded: [builder.and_(loaded, low), builder.and_(builder.lshr(loaded, four), low)],
        fetches=1,
    )
    results, scales = [], of_outputs(0, _VECTOR)
    for row in range(rows):
        unit = broadcast(builder, of_row(4 * row, _VECTOR.element))
        for v, scale in enumerate(scales):
            index = row * VECTORS + v
            scaled = fence(builder, builder.fmul(builder.sitofp(sums[index], _VECTOR), scale))
            results.append(builder.call(fma, [scaled, unit, held[index]]))
    rest, end = builder.sub(left, _I64(1)), builder.block
    x_bytes = builder.add(_I64(8 * rows), builder.mul(steps, _I64(STEP * rows)))
    panel_bytes = builder.add(_I64(6 * WIDE), builder.mul(steps, _I64(STEP // 2 * WIDE)))
    for phi, first, following in (
        (left, groups, rest),
        (from_x, x, builder.add(from_x, x_bytes)),
        (from_panel, panel, builder.add(from_panel, panel_bytes)),
        *((one, _VECTOR(None), result) for one, result in zip(held, results, strict=True)),
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(following, end)
    builder.cbranch(builder.icmp_signed(">", rest, _I64(0)), body, after)
    builder.position_at_end(after)
    write(builder, results, target)


def _of_zeros(builder: Any, zero: Any, total: Any) -> Any:
    """The products of numbers of 16 bits, each the lower half of a word; the upper of ``zero`` is 0."""
    halves = ir.VectorType(_I16, 2 * LANES)
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    multiply = external(builder, name, ir.FunctionType(_SUMS, [halves] * 2))
    return builder.call(multiply, [builder.bitcast(zero, halves), builder.bitcast(total, halves)])


_body = product_body(_pack, _tile, _TALL)


@kernel
def _product(address: Any) -> None:
    _body(*read_arguments(address))
