"""Matrix products with float16 and bfloat16 weights, which are widened in registers.

Widening is exact and the order of the sums is that of ``kernels.cpu.linear.fp32``, so that results are those of the
same weights in float32, to the bit, for half of the memory. A register of 32-bit words has two columns, one after the
other: panels are ``[out / WIDE][in / 2][VECTORS][2][LANES]``.
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
_VECTOR, _WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
_HALVES, _SHORTS = ir.VectorType(_HALF, 2 * LANES), ir.VectorType(_SHORT, 2 * LANES)


class PackedHalf(PackedWeights):
    """A float16 or bfloat16 weight ``[out, in]``, for which ``is_supported`` returns True."""

    def __init__(self, weight: Tensor) -> None:
        """Keeps no reference to ``weight``."""
        kernels = _KERNELS[weight.dtype]
        out, into = weight.shape
        columns, panels = -(-into // STEP) * STEP, -(-out // WIDE)
        padding = (0, columns - into, 0, panels * WIDE - out)
        padded = F.pad(weight, padding) if any(padding) else weight
        words = allocate_resident(padded.numel() // 2).view(panels, columns // 2, WIDE)
        rows = padded.contiguous().view(torch.int16).view(panels, VECTORS, LANES, columns // 2, 2)
        words.view(torch.int16).view(panels, columns // 2, VECTORS, 2, LANES).copy_(rows.permute(0, 3, 1, 4, 2))
        super().__init__(
            kernels.product,
            kernels.name,
            weight.shape,
            words,
            columns // STEP,
            row=4 * columns,
            min_parallel=MIN_PARALLEL,
            experts_kernel=kernels.experts,
        )
        self._reader = kernels.reader

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


class _Kernels(NamedTuple):
    """The kernels for a type of weights."""

    name: str
    product: Kernel
    experts: Kernel
    reader: Kernel


def _create_kernels(
    name: str, unpack: Callable[[Any, Any], Sequence[Any]], widen: Callable[[Any, Any], Any]
) -> _Kernels:
    """Return the kernels for a type of weights.

    ``unpack(builder, loaded)`` makes the floats of two columns of a vector of words. ``widen(builder, short)`` makes a
    float of a weight.
    """
    body = product_body(name, pack_rows, tile_of(unpack, min_prefetch_rows=1))
    return _Kernels(
        name,
        create_kernel(f"multiply_{name}", body),
        create_kernel(f"multiply_experts_{name}", experts_body(name, body)),
        create_kernel(f"read_{name}", _create_reader(name, widen)),
    )


def _create_reader(name: str, widen: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def load(_context: Any, _address: Any) -> Any:
        """Return the weight at an address."""

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return widen(builder, builder.load(pointer_at(builder, arguments[0], 0, _SHORT), align=2))

        return types.float32(types.int64), generate

    @named_function(f"read_rows_{name}")
    def read(a: Any, thread: int, threads: int) -> None:
        rows, columns, size, factor, stride = a[3], a[4], a[5], np.float32(as_float(a[6])), a[7]
        indices, result = int64_array(a[1], (rows * stride,)), float32_array(a[2], (rows, columns))
        first, end = split_range(rows, thread, threads)
        for row in range(first, end):
            index = indices[row * stride]
            lane = index % WIDE
            start = a[0] + index // WIDE * size + 4 * LANES * (lane // LANES) + 2 * (lane % LANES)
            for column in range(columns):
                result[row, column] = factor * load(start + 4 * WIDE * (column // 2) + 2 * LANES * (column % 2))

    return read


def _split(builder: Any, both: Any) -> list[Any]:
    """Return the two columns of a vector."""
    lanes = (ir.Constant(_WORDS, list(range(first, first + LANES))) for first in (0, LANES))
    return [builder.shuffle_vector(both, both, chosen) for chosen in lanes]


def _unpack_bfloat16(builder: Any, loaded: Any) -> list[Any]:
    words = (builder.zext(column, _WORDS) for column in _split(builder, builder.bitcast(loaded, _SHORTS)))
    return [builder.bitcast(builder.shl(word, constant(16, _WORDS)), _VECTOR) for word in words]


def _widen_bfloat16(builder: Any, short: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(short, I32), I32(16)), FLOAT)


def _unpack_float16(builder: Any, loaded: Any) -> list[Any]:
    return [builder.fpext(column, _VECTOR) for column in _split(builder, builder.bitcast(loaded, _HALVES))]


def _widen_float16(builder: Any, short: Any) -> Any:
    return builder.fpext(builder.bitcast(short, _HALF), FLOAT)


_KERNELS = {
    torch.bfloat16: _create_kernels("bfloat16", _unpack_bfloat16, _widen_bfloat16),
    torch.float16: _create_kernels("float16", _unpack_float16, _widen_float16),
}
ALL_KERNELS = [kernel for kernels in _KERNELS.values() for kernel in (kernels.product, kernels.experts, kernels.reader)]
