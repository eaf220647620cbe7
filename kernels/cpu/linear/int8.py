"""Matrix products with int8 weights, and rows that are rounded to 8 bits as they are packed.

Four columns of an output lie side by side, in panels ``[in / 4][WIDE][4]``: with VNNI one instruction multiplies four
unsigned bytes of a row by four signed bytes of an output, and adds all products to a 32-bit sum. So the codes of the
rows are stored with 128 added, and a sum begins at what that adds too much. Without VNNI the codes are signed. Sums are
modulo 2 ** 32, so they are exact if the result fits, whatever happens on the way: for up to 2 ** 17 columns.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import HAS_INT8_DOT, LANES
from kernels.cpu.linear.gemm_tile import VECTORS, WIDE, dot, dot_signed, fence, sum_tile, write_tile
from kernels.cpu.linear.packed_weights import PackedWeights, product_body
from kernels.cpu.linear.rounding import LEVELS, PREFETCH_PER_STEP, STEP, codes_writer, largest
from kernels.cpu.runtime.kernel import float32_array, function, kernel, read_arguments
from kernels.cpu.runtime.memory import allocate_resident
from kernels.cpu.simd.llvm_ir import FLOAT, I32, I64, pointer_at, splat_value

_MIN_PARALLEL = 1 << 20
"""With fewer products one thread is done before a second one has started."""
_ADDED = 128 if HAS_INT8_DOT else 0
"""Number that is added to each code of a row."""
_write_codes = codes_writer(_ADDED)


class PackedInt8(PackedWeights):
    """A weight ``codes * scales``: int8 ``[out, in]`` times float32 ``[out]``."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        """Keeps no reference to ``codes``."""
        out, into = codes.shape
        columns, panels = -(-into // STEP) * STEP, -(-out // WIDE)
        padded = F.pad(codes, (0, columns - into, 0, panels * WIDE - out))
        # The initial sums of a panel, its scales, and its codes.
        words = allocate_resident(panels * (2 + columns // 4) * WIDE).view(panels, 2 + columns // 4, WIDE)
        words.view(torch.int32)[:, 0] = -_ADDED * padded.sum(1, dtype=torch.int32).view(panels, WIDE)
        words[:, 1] = F.pad(scales, (0, panels * WIDE - out)).view(panels, WIDE)
        inside = words.view(torch.int8).view(panels, -1, WIDE, 4)[:, 2:]
        inside.copy_(padded.view(panels, WIDE, columns // 4, 4).transpose(1, 2))
        super().__init__(
            _product, "int8", codes.shape, words, columns // STEP, row=4 + columns, min_parallel=_MIN_PARALLEL
        )


@function
def _pack(to: int, x: int, rows: int, into: int, stride: int, _own: int, ahead: int) -> None:
    """Write the scale of each row, and then their codes."""
    scales, codes = float32_array(to, (rows,)), to + 4 * rows
    for row in range(rows):
        size = largest(x + 4 * row * stride, into)
        scales[row] = size / types.float32(LEVELS)
        factor = types.float32(LEVELS) / size
        prefetched = ahead + PREFETCH_PER_STEP * into // STEP * row
        _write_codes(codes + STEP * row, STEP * rows, x + 4 * row * stride, into, factor, prefetched)


_SUMS, _VECTOR = ir.VectorType(I32, LANES), ir.VectorType(FLOAT, LANES)


def _generate_tile(builder: Any, rows: int, target: Any, x: Any, panel: Any, steps: Any, prefetching: Any) -> None:
    """Generate the product of a block of ``rows`` rows and a panel."""

    def vectors(row: int, kind: Any) -> Any:
        return [
            builder.load(pointer_at(builder, panel, 4 * (row * WIDE + v * LANES), kind), align=4)
            for v in range(VECTORS)
        ]

    sums = sum_tile(
        builder,
        vectors(0, _SUMS) * rows,
        builder.add(x, I64(4 * rows)),
        builder.add(panel, I64(4 * 2 * WIDE)),
        steps,
        prefetching,
        lambda value, column, total: (dot if HAS_INT8_DOT else dot_signed)(builder, total, value, column),
    )
    scaled, output_scales = [], vectors(1, _VECTOR)
    for row in range(rows):
        row_scale = splat_value(builder, builder.load(pointer_at(builder, x, 4 * row, FLOAT), align=4), _VECTOR)
        for v, output_scale in enumerate(output_scales):
            value = builder.sitofp(sums[row * VECTORS + v], _VECTOR)
            for factor in (output_scale, row_scale):
                value = fence(builder, builder.fmul(value, factor))
            scaled.append(value)
    write_tile(builder, scaled, target)


_body = product_body("int8", _pack, _generate_tile)


@kernel
def _product(address: Any) -> None:
    _body(*read_arguments(address))
