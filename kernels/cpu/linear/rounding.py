"""Rounding rows of ``x`` to 8 bits, for products with whole numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.linear.gemm_tile import at, external, prefetch

LEVELS = 127
"""The largest code."""
STEP = 16
"""Columns that are rounded at once, and lie together in a block of x, ``[in / STEP][rows][STEP]``."""
ASKED = 32
"""Bytes that are asked for with each of these groups: of sixteen rows a panel of int8 weights."""
_TINY = 1e-30
"""Numbers that are all smaller are rounded as if this were the largest."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_CODES, _BITS, _NUMBERS = (ir.VectorType(kind, STEP) for kind in (_I8, _I32, _F32))


@intrinsic
def largest(_context: Any, _x: Any, _count: Any) -> Any:
    """The largest magnitude of ``count`` floats, at least ``_TINY``; NaN where one is."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # Of floats without a sign the larger has the larger bits, and NaN the largest.
        larger = external(builder, f"llvm.umax.v{STEP}i32", ir.FunctionType(_BITS, [_BITS] * 2))
        of_all = external(builder, f"llvm.vector.reduce.umax.v{STEP}i32", ir.FunctionType(_I32, [_BITS]))
        magnitude = ir.Constant(_BITS, [0x7FFFFFFF] * STEP)
        tiny = builder.bitcast(ir.Constant(_NUMBERS, [_TINY] * STEP), _BITS)

        def step(_index: Any, numbers: Any, held: Any) -> Any:
            return builder.call(larger, [held, builder.and_(builder.bitcast(numbers, _BITS), magnitude)])

        x, count = arguments
        return builder.bitcast(builder.call(of_all, [_along(builder, x, count, tiny, step)]), _F32)

    return types.float32(types.int64, types.int64), generate


def codes_writer(added: int) -> Any:
    """``(to, stride, x, count, factor, ahead)``: writes ``count`` floats, ``factor`` times each, rounded to the even
    one of two numbers that are as near, with ``added``, in groups of ``STEP``, which begin ``stride`` bytes apart.
    Returns the sum of the rounded numbers. It asks meanwhile for ``ASKED`` bytes at ``ahead`` with each group."""

    @intrinsic
    def write_codes(_context: Any, _to: Any, _stride: Any, _x: Any, _count: Any, _factor: Any, _ahead: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            to, stride, x, count, factor, ahead = arguments
            fma = external(builder, f"llvm.fma.v{STEP}f32", ir.FunctionType(_NUMBERS, [_NUMBERS] * 3))
            of_all = external(builder, f"llvm.vector.reduce.add.v{STEP}i32", ir.FunctionType(_I32, [_BITS]))
            factors = _all(builder, factor)
            # Of a float of this size the last bit is 1: the sum is rounded to a whole number, in its lowest bits.
            whole = ir.Constant(_NUMBERS, [3 * 2.0**22 + added] * STEP)

            def step(index: Any, numbers: Any, held: Any) -> Any:
                prefetch(builder, at(builder, builder.add(ahead, builder.mul(index, _I64(ASKED))), 0, _I8))
                bits = builder.bitcast(builder.call(fma, [numbers, factors, whole]), _BITS)
                place = builder.add(to, builder.mul(index, stride))
                builder.store(builder.trunc(bits, _CODES), at(builder, place, 0, _CODES), align=4)
                return builder.add(held, builder.sub(bits, builder.bitcast(whole, _BITS)))

            return builder.call(of_all, [_along(builder, x, count, _BITS(None), step)])

        return types.int32(*[types.int64] * 4, types.float32, types.int64), generate

    return write_codes


def _along(builder: Any, x: Any, count: Any, begun: Any, step: Any) -> Any:
    """What ``step(index, numbers, held)`` makes of ``begun`` with each ``STEP`` of ``count`` floats; zeros follow
    them."""
    mask = ir.VectorType(ir.IntType(1), STEP)
    pointer = _NUMBERS.as_pointer()
    load = external(
        builder, f"llvm.masked.load.v{STEP}f32.p0", ir.FunctionType(_NUMBERS, [pointer, _I32, mask, _NUMBERS])
    )
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    index, held = builder.phi(_I64), builder.phi(begun.type)
    done = builder.mul(index, _I64(STEP))
    left = _all(builder, builder.trunc(builder.sub(count, done), _I32))
    there = builder.icmp_signed("<", ir.Constant(_BITS, list(range(STEP))), left)
    place = builder.inttoptr(builder.add(x, builder.mul(done, _I64(4))), pointer)
    made = step(index, builder.call(load, [place, _I32(4), there, _NUMBERS(None)]), held)
    following = builder.add(index, _I64(1))
    for phi, first, then in ((index, _I64(0), following), (held, begun, made)):
        phi.add_incoming(first, before)
        phi.add_incoming(then, body)
    builder.cbranch(builder.icmp_signed("<", builder.mul(following, _I64(STEP)), count), body, after)
    builder.position_at_end(after)
    return made


def _all(builder: Any, value: Any) -> Any:
    """A value ``STEP`` times."""
    nothing = ir.Constant(ir.VectorType(value.type, STEP), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, _BITS(None))
