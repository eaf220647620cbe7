"""Matrix products with float16 and bfloat16 weights, which are widened in registers.

Widening is exact and the order of the sums is that of ``kernels.cpu.linear.fp32``, so that results are those of the
same weights in float32, to the bit, for half of the memory. A word of 32 bits has two neighbouring columns. Panels of
bfloat16 are ``[out / WIDE][in / 2][WIDE][2]``: a shift or a mask makes a float of each half of a word. Panels of
float16 are ``[out / WIDE][in / 2][VECTORS][2][LANES]``, as the instruction that widens takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import HAS_FLOAT16, LANES
from kernels.cpu.linear.fp32 import MIN_PARALLEL, STEP, pack_rows, tile_of
from kernels.cpu.linear.gemm_tile import VECTORS, WIDE
from kernels.cpu.linear.packed_weights import PackedWeights, experts_body, product_body
from kernels.cpu.runtime.kernel import (
    Kernel,
    as_float,
    create_kernel,
    float32_array,
    int64_array,
    named_function,
    split_range,
)
from kernels.cpu.runtime.memory import allocate_resident
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.simd.llvm_ir import FLOAT, I32, constant, pointer_at

_HALF, _SHORT = ir.HalfType(), ir.IntType(16)
_VECTOR, _WORDS, _HALVES = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES), ir.VectorType(_HALF, 2 * LANES)


class PackedHalf(PackedWeights):
    """A float16 or bfloat16 weight ``[out, in]``, for which ``is_supported`` returns True."""

    def __init__(self, weight: Tensor) -> None:
        """Keeps no reference to ``weight``."""
        layout = _LAYOUTS[weight.dtype]
        out, into = weight.shape
        columns, panels = -(-into // STEP) * STEP, -(-out // WIDE)
        padding = (0, columns - into, 0, panels * WIDE - out)
        padded = F.pad(weight, padding) if any(padding) else weight
        words = allocate_resident(padded.numel() // 2).view(panels, columns // 2, WIDE)
        layout.pack(words.view(torch.int16), padded.contiguous().view(torch.int16))
        super().__init__(
            layout.product,
            layout.name,
            weight.shape,
            words,
            columns // STEP,
            row=4 * columns,
            min_parallel=MIN_PARALLEL,
            experts_kernel=layout.experts,
        )
        self._reader = layout.reader

    def read_rows(self, indices: Tensor, factor: float = 1.0) -> Tensor:
        """Return the rows with these indices, int64 of any stride, times a number: float32 ``[rows, in]``."""
        rows = len(indices)
        result = empty(rows, self._in)
        if rows:
            size = self._panels.stride(0) * self._panels.itemsize
            threads = 1 if rows * self._in < MIN_PARALLEL >> 4 else None
            arguments = self._panels, indices, result, rows, self._in, size, float(factor), indices.stride(0)
            self._reader(*arguments, threads=threads)
        return result


def is_supported(dtype: torch.dtype) -> bool:
    """Return True if weights of this type can be packed as they are on this processor."""
    return dtype is torch.bfloat16 or (dtype is torch.float16 and HAS_FLOAT16)


class _Layout(NamedTuple):
    """How panels hold a type of weights, and the kernels that read them."""

    name: str
    pack: Callable[[Tensor, Tensor], None]
    """Writes rows, int16 ``[panels * WIDE, columns]``, to panels, int16 ``[panels, columns / 2, 2 * WIDE]``."""
    product: Kernel
    experts: Kernel
    reader: Kernel


def _pack_pairs(panels: Tensor, rows: Tensor) -> None:
    count, pairs, _ = panels.shape
    panels.view(count, pairs, WIDE, 2).copy_(rows.view(count, WIDE, pairs, 2).transpose(1, 2))


def _pack_columns(panels: Tensor, rows: Tensor) -> None:
    count, pairs, _ = panels.shape
    of_vectors = rows.view(count, VECTORS, LANES, pairs, 2).permute(0, 3, 1, 4, 2)
    panels.view(count, pairs, VECTORS, 2, LANES).copy_(of_vectors)


def _create_layout(
    name: str,
    pack: Callable[[Tensor, Tensor], None],
    unpack: Callable[[Any, Any], Sequence[Any]],
    widen: Callable[[Any, Any], Any],
    place: tuple[int, int, int],
) -> _Layout:
    """Return the layout of a type of weights.

    ``unpack(builder, loaded)`` makes the floats of two columns of a vector of words. ``widen(builder, short)`` makes a
    float of a weight. ``place``: the distances, in weights, from a lane, a column and a vector to the next ones within
    a pair of columns.
    """
    body = product_body(name, pack_rows, tile_of(unpack))
    return _Layout(
        name,
        pack,
        create_kernel(f"multiply_{name}", body),
        create_kernel(f"multiply_experts_{name}", experts_body(name, body)),
        create_kernel(f"read_{name}", _create_reader(name, widen, place)),
    )


def _create_reader(name: str, widen: Callable[[Any, Any], Any], place: tuple[int, int, int]) -> Any:
    @intrinsic
    def load(_context: Any, _address: Any) -> Any:
        """Return the weight at an address."""

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return widen(builder, builder.load(pointer_at(builder, arguments[0], 0, _SHORT), align=2))

        return types.float32(types.int64), generate

    to_lane, to_column, to_vector = place

    @named_function(f"read_rows_{name}")
    def read(a: Any, thread: int, threads: int) -> None:
        rows, columns, size, factor, stride = a[3], a[4], a[5], np.float32(as_float(a[6])), a[7]
        indices, result = int64_array(a[1], (rows * stride,)), float32_array(a[2], (rows, columns))
        first, end = split_range(rows, thread, threads)
        for row in range(first, end):
            index = indices[row * stride]
            lane = index % WIDE
            start = a[0] + index // WIDE * size + 2 * (lane // LANES * to_vector + lane % LANES * to_lane)
            for column in range(columns):
                result[row, column] = factor * load(start + 4 * WIDE * (column // 2) + 2 * to_column * (column % 2))

    return read


def _unpack_bfloat16(builder: Any, loaded: Any) -> list[Any]:
    words = builder.bitcast(loaded, _WORDS)
    lower = builder.shl(words, constant(16, _WORDS))
    upper = builder.and_(words, constant(0xFFFF0000, _WORDS))
    return [builder.bitcast(part, _VECTOR) for part in (lower, upper)]


def _widen_bfloat16(builder: Any, short: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(short, I32), I32(16)), FLOAT)


def _unpack_float16(builder: Any, loaded: Any) -> list[Any]:
    halves = builder.bitcast(loaded, _HALVES)
    parts = (ir.Constant(_WORDS, list(range(first, first + LANES))) for first in (0, LANES))
    return [builder.fpext(builder.shuffle_vector(halves, halves, part), _VECTOR) for part in parts]


def _widen_float16(builder: Any, short: Any) -> Any:
    return builder.fpext(builder.bitcast(short, _HALF), FLOAT)


_LAYOUTS = {
    torch.bfloat16: _create_layout("bfloat16", _pack_pairs, _unpack_bfloat16, _widen_bfloat16, (2, 1, 2 * LANES)),
    torch.float16: _create_layout("float16", _pack_columns, _unpack_float16, _widen_float16, (1, LANES, 2 * LANES)),
}
KERNELS = [kernel for layout in _LAYOUTS.values() for kernel in (layout.product, layout.experts, layout.reader)]
