"""Matrix products with int8 weights that are laid out once, and rows that are rounded to 8 bits on their way in.

As in ``kernels.cpu.linear``, but that four columns of an output lie side by side, panels ``[out / WIDE][in / 4][WIDE]
[4]``: one instruction multiplies four bytes of a row, without a sign, by four bytes of an output, with one, and adds
all to a 32-bit sum. The rows' codes are therefore stored with 128 added, and a sum begins at what that adds too much.
Sums are modulo 2 ** 32, so they are exact where the result fits, whatever passes on the way: for 2 ** 17 columns.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.launch import begin, floats, function, kernel, share
from kernels.cpu.memory import resident
from kernels.cpu.tape import empty
from kernels.cpu.tile import (
    FEATURES,
    LANES,
    TALL,
    VECTORS,
    WIDE,
    add,
    at,
    broadcast,
    external,
    for_each_height,
    move,
    tile,
    write,
)

AVAILABLE: bool = FEATURES.get({16: "avx512vnni", 8: "avxvnni"}.get(LANES, ""), False)
"""Whether the processor has the instruction, for its widest vectors."""
_STEP = 16
"""Columns of a block of x, ``[in / _STEP][rows][_STEP]``, that lie together."""
_GROUP = 8 * TALL
"""Rows that take a panel one after the other while it is in the cache of the second level."""
_ALONE, _FREE = 1 << 20, 4
"""Products that one thread computes before two would have begun; reading a weight takes as long as so many."""
_LEVELS = 127
_TINY = 1e-30
"""A row whose numbers are all smaller is rounded as if this were the largest."""


class Int8Panels:
    """``codes * scales`` of int8 ``[out, in]`` and float32 ``[out]``, in panels, for products with many ``x``."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        """Keeps no reference to ``codes``."""
        self._out, self._in = codes.shape
        self._columns, panels = -(-self._in // _STEP) * _STEP, -(-self._out // WIDE)
        whole = F.pad(codes, (0, self._columns - self._in, 0, panels * WIDE - self._out))
        self._weights = resident(whole.numel() // 4).view(torch.int8).view(panels, self._columns // 4, WIDE, 4)
        self._weights.copy_(whole.reshape(panels, WIDE, self._columns // 4, 4).transpose(1, 2))
        self._begun = -128 * whole.sum(1, dtype=torch.int32)
        self._scales = F.pad(scales, (0, panels * WIDE - self._out)).contiguous()

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """``rounded(x) @ (codes * scales).T + bias + residual`` of ``x`` ``[rows, in]``, contiguous ``bias`` ``[out]``
        and ``residual`` ``[rows, out]``. Raises ``ValueError`` where a shape or a type is another."""
        rows, into = x.shape
        if into != self._in or x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype} {[*x.shape]}, the weight int8 {[self._out, self._in]}")
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
        # Each thread's codes of a group of x, the unit of each of its rows, and a tile for the outputs at the right.
        room = -(-rows // groups) * (self._columns // 4 + 1) + TALL * WIDE
        scratch = empty(threads * room)
        _product(
            x.data_ptr(),
            self._weights.data_ptr(),
            self._begun.data_ptr(),
            self._scales.data_ptr(),
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
    x, weights, begun, scales, bias, residual, result, scratch = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
    rows, into, out, stride, groups, room = a[8], a[9], a[10], a[11], a[12], a[13]
    columns = (into + _STEP - 1) // _STEP * _STEP
    panels = (out + WIDE - 1) // WIDE
    edge = scratch + 4 * thread * room
    units = edge + 4 * TALL * WIDE
    item, end = share(groups * panels, thread, threads)
    while item < end:
        # The panels of one group of rows that are this thread's.
        group, first = item // panels, item % panels
        last = min(panels, first + end - item)
        item += last - first
        top, bottom = share(rows, group, groups)
        packed = units + 4 * (bottom - top)
        blocks = (bottom - top + TALL - 1) // TALL
        for block in range(blocks):
            low, high = share(bottom - top, block, blocks)
            _pack(packed + low * columns, units + 4 * low, x + 4 * (top + low) * stride, high - low, into, stride)
        for panel in range(first, last):
            wide = min(WIDE, out - panel * WIDE)
            for block in range(blocks):
                low, high = share(bottom - top, block, blocks)
                offset = 4 * ((top + low) * out + panel * WIDE)
                to, to_stride = (result + offset, 4 * out) if wide == WIDE else (edge, 4 * WIDE)
                _multiply(
                    high - low,
                    to,
                    to_stride,
                    packed + low * columns,
                    units + 4 * low,
                    weights + panel * columns * WIDE,
                    begun + 4 * panel * WIDE,
                    scales + 4 * panel * WIDE,
                    columns // _STEP,
                )
                if wide < WIDE:
                    move(result + offset, edge, high - low, wide, out)
                if bias:
                    add(result + offset, bias + 4 * panel * WIDE, high - low, wide, out, 0)
                if residual:
                    add(result + offset, residual + offset, high - low, wide, out, out)


@function
def _pack(to: int, units: int, x: int, rows: int, into: int, stride: int) -> None:
    """Lays out a block of x: its codes with 128 added, and what a code of each row stands for."""
    sizes = floats(units, (rows,))
    for row in range(rows):
        size = _largest(x + 4 * row * stride, into)
        sizes[row] = size / types.float32(_LEVELS)
        _round(to + _STEP * row, _STEP * rows, x + 4 * row * stride, into, types.float32(_LEVELS) / size)


_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS, _VECTOR = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_CODES, _BITS, _NUMBERS = (ir.VectorType(kind, _STEP) for kind in (_I8, _I32, _F32))


@intrinsic
def _largest(_context: Any, _x: Any, _count: Any) -> Any:
    """The largest magnitude of ``count`` floats, at least ``_TINY``; NaN where one is."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # Of floats without a sign the larger has the larger bits, and NaN the largest.
        larger = external(builder, f"llvm.umax.v{_STEP}i32", ir.FunctionType(_BITS, [_BITS] * 2))
        largest = external(builder, f"llvm.vector.reduce.umax.v{_STEP}i32", ir.FunctionType(_I32, [_BITS]))
        magnitude = ir.Constant(_BITS, [0x7FFFFFFF] * _STEP)
        tiny = builder.bitcast(ir.Constant(_NUMBERS, [_TINY] * _STEP), _BITS)

        def step(_index: Any, numbers: Any, held: Any) -> Any:
            return builder.call(larger, [held, builder.and_(builder.bitcast(numbers, _BITS), magnitude)])

        x, count = arguments
        return builder.bitcast(builder.call(largest, [_along(builder, x, count, tiny, step)]), _F32)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def _round(_context: Any, _to: Any, _stride: Any, _x: Any, _count: Any, _factor: Any) -> Any:
    """Writes ``count`` floats, ``factor`` times each, rounded to the even one of two numbers that are as near, with 128
    added, in groups of ``_STEP``, which begin ``stride`` bytes apart."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, stride, x, count, factor = arguments
        fma = external(builder, f"llvm.fma.v{_STEP}f32", ir.FunctionType(_NUMBERS, [_NUMBERS] * 3))
        factors = _all(builder, factor)
        # Of a float of this size the last bit is 1, so that the sum is rounded to a whole number, in its lowest bits.
        whole = ir.Constant(_NUMBERS, [3 * 2.0**22 + 128] * _STEP)

        def step(index: Any, numbers: Any, held: Any) -> Any:
            codes = builder.trunc(builder.bitcast(builder.call(fma, [numbers, factors, whole]), _BITS), _CODES)
            place = builder.add(to, builder.mul(index, stride))
            builder.store(codes, at(builder, place, 0, _CODES), align=4)
            return held

        _along(builder, x, count, _I32(0), step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), generate


def _along(builder: Any, x: Any, count: Any, begun: Any, step: Any) -> Any:
    """What ``step(index, numbers, held)`` makes of ``begun`` with each ``_STEP`` of ``count`` floats; zeros follow
    them."""
    mask = ir.VectorType(ir.IntType(1), _STEP)
    pointer = _NUMBERS.as_pointer()
    load = external(
        builder, f"llvm.masked.load.v{_STEP}f32.p0", ir.FunctionType(_NUMBERS, [pointer, _I32, mask, _NUMBERS])
    )
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    index, held = builder.phi(_I64), builder.phi(begun.type)
    done = builder.mul(index, _I64(_STEP))
    left = _all(builder, builder.trunc(builder.sub(count, done), _I32))
    there = builder.icmp_signed("<", ir.Constant(_BITS, list(range(_STEP))), left)
    place = builder.inttoptr(builder.add(x, builder.mul(done, _I64(4))), pointer)
    made = step(index, builder.call(load, [place, _I32(4), there, _NUMBERS(None)]), held)
    following = builder.add(index, _I64(1))
    for phi, first, then in ((index, _I64(0), following), (held, begun, made)):
        phi.add_incoming(first, before)
        phi.add_incoming(then, body)
    builder.cbranch(builder.icmp_signed("<", builder.mul(following, _I64(_STEP)), count), body, after)
    builder.position_at_end(after)
    return made


def _all(builder: Any, value: Any) -> Any:
    """A value ``_STEP`` times."""
    nothing = ir.Constant(ir.VectorType(value.type, _STEP), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, _BITS(None))


@intrinsic
def _multiply(
    _context: Any,
    _rows: Any,
    _to: Any,
    _stride: Any,
    _x: Any,
    _units: Any,
    _weights: Any,
    _begun: Any,
    _scales: Any,
    _steps: Any,
) -> Any:
    """Writes the product of a block of x, of ``rows`` rows, and a panel, in rows that begin ``stride`` bytes apart."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, *rest = arguments
        for_each_height(builder, rows, lambda some: _tile(builder, some, *rest))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _tile(
    builder: Any, rows: int, to: Any, stride: Any, x: Any, units: Any, weights: Any, begun: Any, scales: Any, steps: Any
) -> None:
    """The instructions for one number of rows."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
    dot = external(builder, name, ir.FunctionType(_SUMS, [_SUMS] * 3))

    def vectors(start: Any, kind: Any) -> Any:
        return [builder.load(at(builder, start, 4 * v * LANES, kind), align=4) for v in range(VECTORS)]

    sums = tile(
        builder,
        vectors(begun, _SUMS) * rows,
        x,
        weights,
        steps,
        lambda value, column, held: builder.call(dot, [held, value, column]),
    )
    # The compiler may multiply and add in another order, and in another for another number of rows; not across a fence.
    fence = external(builder, f"llvm.arithmetic.fence.v{LANES}f32", ir.FunctionType(_VECTOR, [_VECTOR]))
    scaled, of_outputs = [], vectors(scales, _VECTOR)
    for row in range(rows):
        of_row = broadcast(builder, builder.load(at(builder, units, 4 * row, _F32), align=4))
        for v, of_output in enumerate(of_outputs):
            value = builder.sitofp(sums[row * VECTORS + v], _VECTOR)
            for factor in (of_output, of_row):
                value = builder.call(fence, [builder.fmul(value, factor)])
            scaled.append(value)
    write(builder, scaled, to, stride)
