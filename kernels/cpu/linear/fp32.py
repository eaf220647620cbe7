"""Matrix products with float32 weights that are laid out once, in panels ``[out / WIDE][in][WIDE]``.

A tile of up to ``TALL`` rows by ``WIDE`` outputs stays in registers while ``in`` goes by. Each element of the result
is one chain of fused multiplications and additions in the order of ``in``, whatever the number of rows or threads: the
same to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import LANES
from kernels.cpu.linear.gemm_tile import VECTORS, WIDE, external, tile, write
from kernels.cpu.linear.packed_weights import Panels, product_body
from kernels.cpu.runtime.kernel import float32_array, function, kernel, read_arguments
from kernels.cpu.runtime.memory import resident

_STEP = 4
"""Columns of a block of x, ``[in / _STEP][rows][_STEP]``, that lie together."""
_ALONE = 1 << 18
"""Products that one thread computes before two would have begun."""


class FloatPanels(Panels):
    """A float32 ``weight`` ``[out, in]``."""

    def __init__(self, weight: Tensor) -> None:
        """Keeps no reference to ``weight``."""
        out, into = weight.shape
        columns, panels = -(-into // _STEP) * _STEP, -(-out // WIDE)
        missing = (0, columns - into, 0, panels * WIDE - out)
        whole = F.pad(weight, missing) if any(missing) else weight
        weights = resident(whole.numel()).view(panels, columns, WIDE)
        weights.copy_(whole.reshape(panels, WIDE, columns).transpose(1, 2))
        super().__init__(_product, "float32", weight.shape, weights, columns // _STEP, row=4 * columns, alone=_ALONE)


@function
def _pack(to: int, x: int, rows: int, into: int, stride: int, _own: int, _ahead: int) -> None:
    for step in range(into // _STEP):
        for row in range(rows):
            _copy(to, x + 4 * (row * stride + step * _STEP))
            to += 4 * _STEP
    left = into % _STEP
    if left:
        source, rest = float32_array(x, (rows * stride,)), float32_array(to, (rows, _STEP))
        for row in range(rows):
            for i in range(_STEP):
                rest[row, i] = source[row * stride + into - left + i] if i < left else np.float32(0)


_VECTOR = ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def _copy(_context: Any, _to: Any, _source: Any) -> Any:
    """Copies ``_STEP`` floats."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source = (builder.inttoptr(a, ir.VectorType(ir.FloatType(), _STEP).as_pointer()) for a in arguments)
        builder.store(builder.load(source, align=4), to, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _tile(builder: Any, rows: int, target: Any, x: Any, weights: Any, steps: Any, fetch: Any) -> None:
    """The instructions for one number of rows."""
    fma = external(builder, f"llvm.fmuladd.v{LANES}f32", ir.FunctionType(_VECTOR, [_VECTOR] * 3))
    zeros = [_VECTOR(None)] * (rows * VECTORS)
    sums = tile(
        builder, zeros, x, weights, steps, fetch, lambda value, column, held: builder.call(fma, [value, column, held])
    )
    write(builder, sums, target)


_body = product_body(_pack, _tile)


@kernel
def _product(address: Any) -> None:
    _body(*read_arguments(address))
