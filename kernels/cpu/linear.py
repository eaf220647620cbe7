"""Matrix products with weights that are laid out once.

The weights lie in panels ``[out / _WIDE][in][_WIDE]``, one stream of memory from beginning to end. A tile of up to
``_TALL`` rows by ``_WIDE`` outputs stays in registers while ``in`` goes by. Each element of the result is one chain of
fused multiplications and additions in the order of ``in``, whatever the number of rows or threads: the same to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.launch import begin, floats, function, kernel, share
from kernels.cpu.memory import resident
from kernels.cpu.tape import empty

_FEATURES = binding.get_host_cpu_features()
# Lanes of a vector, vectors and rows of a tile: its sums, one x and one column of weights fill the registers.
if _FEATURES.get("avx512f"):
    _LANES, _VECTORS, _TALL = 16, 2, 14
elif _FEATURES.get("avx2"):
    _LANES, _VECTORS, _TALL = 8, 2, 6
else:
    _LANES, _VECTORS, _TALL = 4, 4, 6
_WIDE = _LANES * _VECTORS
_STEP = 4
"""Columns of a block of x, ``[in / _STEP][rows][_STEP]``, that lie together."""
_GROUP = 8 * _TALL
"""Rows that take a panel one after the other while it is in the cache of the second level."""
_ALONE, _FREE = 1 << 18, 4
"""Products that one thread computes before two would have begun; reading a weight takes as long as so many."""
_LINE = 64
"""Bytes of a line of the cache."""
_AHEAD = 16 << 10
"""Bytes of weights between what is used and what is fetched into the cache of the second level."""
_FETCHES = 6
"""From so many rows on, the arithmetic is slow enough to let the processor forget to read ahead by itself."""


class Panels:
    """``weight`` ``[out, in]`` in panels, for products with many ``x``."""

    def __init__(self, weight: Tensor) -> None:
        """Keeps no reference to ``weight``, which is float32."""
        self._out, self._in = weight.shape
        self._columns, panels = -(-self._in // _STEP) * _STEP, -(-self._out // _WIDE)
        missing = (0, self._columns - self._in, 0, panels * _WIDE - self._out)
        whole = F.pad(weight, missing) if any(missing) else weight
        self._weights = resident(whole.numel()).view(panels, self._columns, _WIDE)
        self._weights.copy_(whole.reshape(panels, _WIDE, self._columns).transpose(1, 2))

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
        room = -(-rows // groups) * self._columns + _TALL * _WIDE
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
    panels = (out + _WIDE - 1) // _WIDE
    packed = scratch + 4 * thread * room
    edge = packed + 4 * (room - _TALL * _WIDE)
    item, end = share(groups * panels, thread, threads)
    while item < end:
        # The panels of one group of rows that are this thread's.
        group, first = item // panels, item % panels
        last = min(panels, first + end - item)
        item += last - first
        top, bottom = share(rows, group, groups)
        blocks = (bottom - top + _TALL - 1) // _TALL
        for block in range(blocks):
            low, high = share(bottom - top, block, blocks)
            _pack(packed + 4 * low * columns, x + 4 * (top + low) * stride, high - low, into, stride)
        for panel in range(first, last):
            wide = min(_WIDE, out - panel * _WIDE)
            for block in range(blocks):
                low, high = share(bottom - top, block, blocks)
                offset = 4 * ((top + low) * out + panel * _WIDE)
                to, to_stride = (result + offset, 4 * out) if wide == _WIDE else (edge, 4 * _WIDE)
                block_x, block_weights = packed + 4 * low * columns, weights + 4 * panel * columns * _WIDE
                _multiply(high - low, to, to_stride, block_x, block_weights, columns // _STEP)
                if wide < _WIDE:
                    _move(result + offset, edge, high - low, wide, out)
                if bias:
                    _add(result + offset, bias + 4 * panel * _WIDE, high - low, wide, out, 0)
                if residual:
                    _add(result + offset, residual + offset, high - low, wide, out, out)


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


@function
def _move(to: int, edge: int, rows: int, wide: int, out: int) -> None:
    """Copies the outputs of the last panel that there are."""
    source, target = floats(edge, (rows, _WIDE)), floats(to, (rows * out,))
    for row in range(rows):
        for i in range(wide):
            target[row * out + i] = source[row, i]


@function
def _add(to: int, summand: int, rows: int, wide: int, out: int, stride: int) -> None:
    """Adds rows ``stride`` apart to a tile of the result."""
    for row in range(rows):
        target, source = floats(to + 4 * row * out, (_WIDE,)), floats(summand + 4 * row * stride, (_WIDE,))
        if wide == _WIDE:
            for i in range(_WIDE):
                target[i] += source[i]
        else:
            for i in range(wide):
                target[i] += source[i]


_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, _LANES)


@intrinsic
def _copy(_context: Any, _to: Any, _source: Any) -> Any:
    """Copies ``_STEP`` floats."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source = (builder.inttoptr(a, ir.VectorType(_F32, _STEP).as_pointer()) for a in arguments)
        builder.store(builder.load(source, align=4), to, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _multiply(_context: Any, _rows: Any, _to: Any, _stride: Any, _x: Any, _weights: Any, _steps: Any) -> Any:
    """Writes the product of a block of x, of ``rows`` rows, and a panel, in rows that begin ``stride`` bytes apart."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, *rest = arguments
        done = builder.append_basic_block()
        choice = builder.switch(rows, done)
        for some in range(1, _TALL + 1):
            case = builder.append_basic_block()
            choice.add_case(_I64(some), case)
            builder.position_at_end(case)
            _tile(builder, some, *rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _tile(builder: Any, rows: int, to: Any, stride: Any, x: Any, weights: Any, steps: Any) -> None:
    """The instructions for one number of rows."""
    fma = _external(builder, f"llvm.fmuladd.v{_LANES}f32", ir.FunctionType(_VECTOR, [_VECTOR] * 3))
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    step, from_x, from_weights = (builder.phi(_I64) for _ in range(3))
    starts = [builder.phi(_VECTOR) for _ in range(rows * _VECTORS)]
    sums = list(starts)
    if rows >= _FETCHES:
        for offset in range(0, 4 * _STEP * _WIDE, _LINE):
            _prefetch(builder, _at(builder, from_weights, _AHEAD + offset, ir.IntType(8)))
    for k in range(_STEP):
        column = [
            builder.load(_at(builder, from_weights, 4 * (k * _VECTORS + v) * _LANES, _VECTOR), align=4 * _LANES)
            for v in range(_VECTORS)
        ]
        for row in range(rows):
            value = _broadcast(builder, builder.load(_at(builder, from_x, 4 * (row * _STEP + k), _F32), align=4))
            for v in range(_VECTORS):
                sums[row * _VECTORS + v] = builder.call(fma, [value, column[v], sums[row * _VECTORS + v]])
    left = builder.sub(step, _I64(1))
    for phi, begun, following in (
        (step, steps, left),
        (from_x, x, builder.add(from_x, _I64(4 * rows * _STEP))),
        (from_weights, weights, builder.add(from_weights, _I64(4 * _STEP * _WIDE))),
        *((start, _VECTOR(None), total) for start, total in zip(starts, sums, strict=True)),
    ):
        phi.add_incoming(begun, before)
        phi.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed(">", left, _I64(0)), body, after)
    builder.position_at_end(after)
    for row in range(rows):
        start = builder.add(to, builder.mul(stride, _I64(row)))
        for v in range(_VECTORS):
            builder.store(sums[row * _VECTORS + v], _at(builder, start, 4 * v * _LANES, _VECTOR), align=4)


def _at(builder: Any, start: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(start, _I64(offset)), kind.as_pointer())


def _prefetch(builder: Any, line: Any) -> None:
    prefetch = _external(builder, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [line.type, _I32, _I32, _I32]))
    builder.call(prefetch, [line, _I32(0), _I32(2), _I32(1)])


def _broadcast(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(nothing, value, _I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES))


def _external(builder: Any, name: str, kind: Any) -> Any:
    declared = builder.module.globals.get(name)
    return declared if declared is not None else ir.Function(builder.module, kind, name)
