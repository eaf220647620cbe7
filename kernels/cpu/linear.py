"""Matrix products with weights that are laid out once.

The weights lie in panels ``[out / WIDE][in][WIDE]``, one stream of memory from beginning to end. A tile of up to
``TALL`` rows by ``WIDE`` outputs stays in registers while ``in`` goes by. Each element of the result is one chain of
fused multiplications and additions in the order of ``in``, whatever the number of rows or threads: the same to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.launch import begin, floats, function, kernel, share
from kernels.cpu.memory import resident
from kernels.cpu.tape import empty
from kernels.cpu.tile import LANES, TALL, VECTORS, WIDE, add, external, for_each_height, move, tile, write

_STEP = 4
"""Columns of a block of x, ``[in / _STEP][rows][_STEP]``, that lie together."""
_GROUP = 8 * TALL
"""Rows that take a panel one after the other while it is in the cache of the second level."""
_ALONE, _FREE = 1 << 18, 4
"""Products that one thread computes before two would have begun; reading a weight takes as long as so many."""


class Panels:
    """``weight`` ``[out, in]`` in panels, for products with many ``x``."""

    def __init__(self, weight: Tensor) -> None:
        """Keeps no reference to ``weight``, which is float32."""
        self._out, self._in = weight.shape
        self._columns, panels = -(-self._in // _STEP) * _STEP, -(-self._out // WIDE)
        missing = (0, self._columns - self._in, 0, panels * WIDE - self._out)
        whole = F.pad(weight, missing) if any(missing) else weight
        self._weights = resident(whole.numel()).view(panels, self._columns, WIDE)
        self._weights.copy_(whole.reshape(panels, WIDE, self._columns).transpose(1, 2))

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """``x @ weight.T + bias + residual`` of ``x`` ``[rows, in]``, contiguous ``bias`` ``[out]`` and ``residual``
        ``[rows, out]``. Raises ``ValueError`` where a shape or a type is another."""
        rows, into = x.shape
        if into != self._in or x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype} {[*x.shape]}, the weight float32 {[self._out, self._in]}")
        if residual is not None and (residual.shape != (rows, self._out) or residual.dtype != torch.float32):
            raise ValueError(f"the residual is {residual.dtype} {[*residual.shape]}, the product {[rows, self._out]}")
        out = empty(rows, self._out)
        if rows == 0:
            return out
        stride, one = x.stride()
        if one != 1:
            x, stride = x.contiguous(), self._in
        if residual is not None:
            residual = residual.contiguous()
        threads = 1 if max(rows, _FREE) * self._weights.numel() < _ALONE else torch.get_num_threads()
        groups = -(-rows // _GROUP)
        # Each thread's copy of a group of x, and a tile for the outputs at the right edge.
        room = -(-rows // groups) * self._columns + TALL * WIDE
        scratch = empty(threads * room)
        _product(
            x.data_ptr(),
            self._weights.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            rows,
            self._in,
            self._out,
            stride,
            groups,
            room,
            threads=threads,
        )
        return out


@kernel
def _product(address: Any) -> None:
    a, thread, threads = begin(address)
    x, weights, bias, residual, result, scratch = a[0], a[1], a[2], a[3], a[4], a[5]
    rows, into, out, stride, groups, room = a[6], a[7], a[8], a[9], a[10], a[11]
    columns = (into + _STEP - 1) // _STEP * _STEP
    panels = (out + WIDE - 1) // WIDE
    packed = scratch + 4 * thread * room
    edge = packed + 4 * (room - TALL * WIDE)
    item, end = share(groups * panels, thread, threads)
    while item < end:
        # The panels of one group of rows that are this thread's.
        group, first = item // panels, item % panels
        last = min(panels, first + end - item)
        item += last - first
        top, bottom = share(rows, group, groups)
        blocks = (bottom - top + TALL - 1) // TALL
        for block in range(blocks):
            low, high = share(bottom - top, block, blocks)
            _pack(packed + 4 * low * columns, x + 4 * (top + low) * stride, high - low, into, stride)
        for panel in range(first, last):
            wide = min(WIDE, out - panel * WIDE)
            for block in range(blocks):
                low, high = share(bottom - top, block, blocks)
                offset = 4 * ((top + low) * out + panel * WIDE)
                to, to_stride = (result + offset, 4 * out) if wide == WIDE else (edge, 4 * WIDE)
                block_x, block_weights = packed + 4 * low * columns, weights + 4 * panel * columns * WIDE
                _multiply(high - low, to, to_stride, block_x, block_weights, columns // _STEP)
                if wide < WIDE:
                    move(result + offset, edge, high - low, wide, out)
                if bias:
                    add(result + offset, bias + 4 * panel * WIDE, high - low, wide, out, 0)
                if residual:
                    add(result + offset, residual + offset, high - low, wide, out, out)


@function
def _pack(to: int, x: int, rows: int, into: int, stride: int) -> None:
    """Lays out a block of x."""
    for step in range(into // _STEP):
        for row in range(rows):
            _copy(to, x + 4 * (row * stride + step * _STEP))
            to += 4 * _STEP
    left = into % _STEP
    if left:
        source, rest = floats(x, (rows * stride,)), floats(to, (rows, _STEP))
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


@intrinsic
def _multiply(_context: Any, _rows: Any, _to: Any, _stride: Any, _x: Any, _weights: Any, _steps: Any) -> Any:
    """Writes the product of a block of x, of ``rows`` rows, and a panel, in rows that begin ``stride`` bytes apart."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, *rest = arguments
        for_each_height(builder, rows, lambda some: _tile(builder, some, *rest))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _tile(builder: Any, rows: int, to: Any, stride: Any, x: Any, weights: Any, steps: Any) -> None:
    """The instructions for one number of rows."""
    fma = external(builder, f"llvm.fmuladd.v{LANES}f32", ir.FunctionType(_VECTOR, [_VECTOR] * 3))
    zeros = [_VECTOR(None)] * (rows * VECTORS)
    sums = tile(builder, zeros, x, weights, steps, lambda value, column, held: builder.call(fma, [value, column, held]))
    write(builder, sums, to, stride)
