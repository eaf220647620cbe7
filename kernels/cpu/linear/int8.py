"""Matrix products with int8 weights that are laid out once, and rows that are rounded to 8 bits on their way in.

Four columns of an output lie side by side, in panels ``[in / 4][WIDE][4]``: one instruction multiplies four bytes of a
row, without a sign, by four bytes of an output, with one, and adds all to a 32-bit sum. The rows' codes are therefore
stored with 128 added, and a sum begins at what that adds too much. Sums are modulo 2 ** 32, so they are exact where the
result fits, whatever passes on the way: for 2 ** 17 columns.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import LANES
from kernels.cpu.linear.gemm_tile import VECTORS, WIDE, at, broadcast, dot, fence, tile, write
from kernels.cpu.linear.packed_weights import Panels, product_body
from kernels.cpu.linear.rounding import ASKED, LEVELS, STEP, codes_writer, largest
from kernels.cpu.runtime.kernel import float32_array, function, kernel, read_arguments
from kernels.cpu.runtime.memory import resident

_ALONE = 1 << 20
"""Products that one thread computes before two would have begun."""
_write_codes = codes_writer(128)


class Int8Panels(Panels):
    """``codes * scales`` of int8 ``[out, in]`` and float32 ``[out]``."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        """Keeps no reference to ``codes``."""
        out, into = codes.shape
        columns, panels = -(-into // STEP) * STEP, -(-out // WIDE)
        whole = F.pad(codes, (0, columns - into, 0, panels * WIDE - out))
        # Where the sums of a panel begin, its scales, and its codes.
        words = resident(panels * (2 + columns // 4) * WIDE).view(panels, 2 + columns // 4, WIDE)
        words.view(torch.int32)[:, 0] = -128 * whole.sum(1, dtype=torch.int32).view(panels, WIDE)
        words[:, 1] = F.pad(scales, (0, panels * WIDE - out)).view(panels, WIDE)
        inside = words.view(torch.int8).view(panels, -1, WIDE, 4)[:, 2:]
        inside.copy_(whole.view(panels, WIDE, columns // 4, 4).transpose(1, 2))
        super().__init__(_product, "int8", codes.shape, words, columns // STEP, row=4 + columns, alone=_ALONE)


@function
def _pack(to: int, x: int, rows: int, into: int, stride: int, _own: int, ahead: int) -> None:
    """The unit of each row, and then their codes with 128 added."""
    units, codes = float32_array(to, (rows,)), to + 4 * rows
    for row in range(rows):
        size = largest(x + 4 * row * stride, into)
        units[row] = size / types.float32(LEVELS)
        factor = types.float32(LEVELS) / size
        asked = ahead + ASKED * into // STEP * row
        _write_codes(codes + STEP * row, STEP * rows, x + 4 * row * stride, into, factor, asked)


_SUMS, _VECTOR = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)


def _tile(builder: Any, rows: int, target: Any, x: Any, panel: Any, steps: Any, fetch: Any) -> None:
    def vectors(row: int, kind: Any) -> Any:
        return [builder.load(at(builder, panel, 4 * (row * WIDE + v * LANES), kind), align=4) for v in range(VECTORS)]

    sums = tile(
        builder,
        vectors(0, _SUMS) * rows,
        builder.add(x, ir.IntType(64)(4 * rows)),
        builder.add(panel, ir.IntType(64)(4 * 2 * WIDE)),
        steps,
        fetch,
        lambda value, column, held: dot(builder, held, value, column),
    )
    scaled, of_outputs = [], vectors(1, _VECTOR)
    for row in range(rows):
        of_row = broadcast(builder, builder.load(at(builder, x, 4 * row, _VECTOR.element), align=4))
        for v, of_output in enumerate(of_outputs):
            value = builder.sitofp(sums[row * VECTORS + v], _VECTOR)
            for factor in (of_output, of_row):
                value = fence(builder, builder.fmul(value, factor))
            scaled.append(value)
    write(builder, scaled, target)


_body = product_body(_pack, _tile)


@kernel
def _product(address: Any) -> None:
    _body(*read_arguments(address))
