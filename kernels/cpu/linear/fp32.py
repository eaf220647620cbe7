"""Matrix products with float32 weights, packed in panels ``[out / WIDE][in][WIDE]``.

A tile of up to ``TALL`` rows by ``WIDE`` outputs stays in registers while ``in`` goes by. Each element of the result is
a chain of fused multiply-adds in the order of ``in``, whatever the number of rows or threads: the same to the bit.
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
from kernels.cpu.linear.gemm_tile import VECTORS, WIDE, sum_tile, write_tile
from kernels.cpu.linear.packed_weights import PackedWeights, experts_body, product_body
from kernels.cpu.runtime.kernel import float32_array, function, kernel, read_arguments
from kernels.cpu.runtime.memory import allocate_resident
from kernels.cpu.simd.llvm_ir import FLOAT, call_intrinsic, pointer_at, store_vector

_STEP = 4
"""Columns that lie together in a block of x, ``[in / _STEP][rows][_STEP]``."""
_MIN_PARALLEL = 1 << 18
"""With fewer products one thread is done before a second one has started."""


class PackedFloat32(PackedWeights):
    """A float32 weight ``[out, in]``."""

    def __init__(self, weight: Tensor) -> None:
        """Keeps no reference to ``weight``."""
        out, into = weight.shape
        columns, panels = -(-into // _STEP) * _STEP, -(-out // WIDE)
        padding = (0, columns - into, 0, panels * WIDE - out)
        padded = F.pad(weight, padding) if any(padding) else weight
        weights = allocate_resident(padded.numel()).view(panels, columns, WIDE)
        weights.copy_(padded.reshape(panels, WIDE, columns).transpose(1, 2))
        super().__init__(
            _product,
            "float32",
            weight.shape,
            weights,
            columns // _STEP,
            row=4 * columns,
            min_parallel=_MIN_PARALLEL,
            experts_kernel=_multiply_experts,
        )


@function
def _pack(to: int, x: int, rows: int, into: int, stride: int, _own: int, _ahead: int) -> None:
    """Write a block of rows, the last step padded with zeros."""
    for step in range(into // _STEP):
        for row in range(rows):
            _copy(to, x + 4 * (row * stride + step * _STEP))
            to += 4 * _STEP
    num_rest = into % _STEP
    if num_rest:
        source, rest = float32_array(x, (rows * stride,)), float32_array(to, (rows, _STEP))
        for row in range(rows):
            for i in range(_STEP):
                rest[row, i] = source[row * stride + into - num_rest + i] if i < num_rest else np.float32(0)


@intrinsic
def _copy(_context: Any, _to: Any, _source: Any) -> Any:
    """Copy ``_STEP`` floats."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source = arguments
        floats = builder.load(pointer_at(builder, source, 0, ir.VectorType(FLOAT, _STEP)), align=4)
        store_vector(builder, floats, to)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _generate_tile(builder: Any, rows: int, target: Any, x: Any, weights: Any, steps: Any, prefetching: Any) -> None:
    """Generate the product of a block of ``rows`` rows and a panel."""
    vector = ir.VectorType(FLOAT, LANES)

    def multiply(value: Any, column: Any, total: Any) -> Any:
        return call_intrinsic(builder, f"llvm.fmuladd.v{LANES}f32", vector, value, column, total)

    zeros = [vector(None)] * (rows * VECTORS)
    write_tile(builder, sum_tile(builder, zeros, x, weights, steps, prefetching, multiply), target)


_body = product_body("float32", _pack, _generate_tile)


_experts_body = experts_body("float32", _body)


@kernel
def _product(address: Any) -> None:
    _body(*read_arguments(address))


@kernel
def _multiply_experts(address: Any) -> None:
    _experts_body(*read_arguments(address))
