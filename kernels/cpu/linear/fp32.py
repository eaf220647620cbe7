"""Matrix products with float32 weights, packed in panels ``[out / WIDE][in][WIDE]``.

A tile of up to ``TALL`` rows by ``WIDE`` outputs stays in registers while ``in`` goes by. Each element of the result is
a chain of fused multiply-adds in the order of ``in``, whatever the number of rows or threads: the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import LANES
from kernels.cpu.linear.gemm_tile import MIN_PREFETCH_ROWS, VECTORS, WIDE, sum_tile, write_tile
from kernels.cpu.linear.packed_weights import PackedWeights, experts_body, product_body
from kernels.cpu.runtime.kernel import float32_array, function, kernel, read_arguments
from kernels.cpu.runtime.memory import allocate_resident
from kernels.cpu.simd.llvm_ir import FLOAT, call_intrinsic, pointer_at, store_vector

STEP = 4
"""Columns that lie together in a block of x, ``[in / STEP][rows][STEP]``."""
MIN_PARALLEL = 1 << 18
"""With fewer products one thread is done before a second one has started."""


class PackedFloat32(PackedWeights):
    """A float32 weight ``[out, in]``."""

    def __init__(self, weight: Tensor) -> None:
        """Keeps no reference to ``weight``."""
        out, into = weight.shape
        columns, panels = -(-into // STEP) * STEP, -(-out // WIDE)
        padding = (0, columns - into, 0, panels * WIDE - out)
        padded = F.pad(weight, padding) if any(padding) else weight
        weights = allocate_resident(padded.numel()).view(panels, columns, WIDE)
        weights.copy_(padded.reshape(panels, WIDE, columns).transpose(1, 2))
        super().__init__(
            _product,
            "float32",
            weight.shape,
            weights,
            columns // STEP,
            row=4 * columns,
            min_parallel=MIN_PARALLEL,
            experts_kernel=_multiply_experts,
        )


@function
def pack_rows(to: int, x: int, rows: int, into: int, stride: int, _own: int, _ahead: int) -> None:
    """Write a block of rows, the last step padded with zeros."""
    for step in range(into // STEP):
        for row in range(rows):
            _copy(to, x + 4 * (row * stride + step * STEP))
            to += 4 * STEP
    num_rest = into % STEP
    if num_rest:
        source, rest = float32_array(x, (rows * stride,)), float32_array(to, (rows, STEP))
        for row in range(rows):
            for i in range(STEP):
                rest[row, i] = source[row * stride + into - num_rest + i] if i < num_rest else np.float32(0)


@intrinsic
def _copy(_context: Any, _to: Any, _source: Any) -> Any:
    """Copy ``STEP`` floats."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source = arguments
        floats = builder.load(pointer_at(builder, source, 0, ir.VectorType(FLOAT, STEP)), align=4)
        store_vector(builder, floats, to)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def tile_of(
    unpack: Callable[[Any, Any], Sequence[Any]], min_prefetch_rows: int = MIN_PREFETCH_ROWS
) -> Callable[..., None]:
    """Return the function that generates the product of a block of rows and a panel, for ``product_body``.

    ``unpack(builder, loaded)`` makes the floats of a column, or more, of a vector of weights as they lie in memory.
    ``min_prefetch_rows``: see ``sum_tile``.
    """

    def generate_tile(builder: Any, rows: int, target: Any, x: Any, weights: Any, steps: Any, prefetching: Any) -> None:
        vector = ir.VectorType(FLOAT, LANES)

        def multiply(value: Any, column: Any, total: Any) -> Any:
            return call_intrinsic(builder, f"llvm.fmuladd.v{LANES}f32", vector, value, column, total)

        zeros = [vector(None)] * (rows * VECTORS)
        columns = partial(unpack, builder)
        sums = sum_tile(builder, zeros, x, weights, steps, prefetching, multiply, columns, min_prefetch_rows)
        write_tile(builder, sums, target)

    return generate_tile


_body = product_body("float32", pack_rows, tile_of(lambda _builder, loaded: [loaded]))


_experts_body = experts_body("float32", _body)


@kernel
def _product(address: Any) -> None:
    _body(*read_arguments(address))


@kernel
def _multiply_experts(address: Any) -> None:
    _experts_body(*read_arguments(address))
