"""Rounding rows of ``x`` to 8 bits, for integer products."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.linear.gemm_tile import declare, pointer_at, prefetch

LEVELS = 127
"""The largest code."""
STEP = 16
"""Columns that are rounded at once and lie together in a block of x, ``[in / STEP][rows][STEP]``."""
PREFETCH_PER_STEP = 32
"""Bytes that are prefetched with each step: with sixteen rows that is a panel of int8 weights."""
_TINY = 1e-30
"""The largest magnitude is at least this."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_CODES, _BITS, _NUMBERS = (ir.VectorType(kind, STEP) for kind in (_I8, _I32, _F32))


@intrinsic
def largest(_context: Any, _x: Any, _count: Any) -> Any:
    """Return the largest magnitude of ``count`` floats, at least ``_TINY``; NaN if one is NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # The bits of magnitudes order as the magnitudes do, and those of NaN are the largest.
        larger = declare(builder, f"llvm.umax.v{STEP}i32", ir.FunctionType(_BITS, [_BITS] * 2))
        of_all = declare(builder, f"llvm.vector.reduce.umax.v{STEP}i32", ir.FunctionType(_I32, [_BITS]))
        magnitude = ir.Constant(_BITS, [0x7FFFFFFF] * STEP)
        tiny = builder.bitcast(ir.Constant(_NUMBERS, [_TINY] * STEP), _BITS)

        def step(_index: Any, numbers: Any, total: Any) -> Any:
            return builder.call(larger, [total, builder.and_(builder.bitcast(numbers, _BITS), magnitude)])

        x, count = arguments
        return builder.bitcast(builder.call(of_all, [_reduce(builder, x, count, tiny, step)]), _F32)

    return types.float32(types.int64, types.int64), generate


def codes_writer(added: int) -> Any:
    """Make a function ``(to, stride, x, count, factor, ahead)`` that writes rounded numbers and returns their sum.

    It multiplies ``count`` floats by ``factor``, rounds them to the nearest integer, ties to even, and writes them with
    ``added`` in groups of ``STEP``, which begin ``stride`` bytes apart. Prefetches ``PREFETCH_PER_STEP`` bytes at
    ``ahead`` with each group.
    """

    @intrinsic
    def write_codes(_context: Any, _to: Any, _stride: Any, _x: Any, _count: Any, _factor: Any, _ahead: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            to, stride, x, count, factor, ahead = arguments
            fma = declare(builder, f"llvm.fma.v{STEP}f32", ir.FunctionType(_NUMBERS, [_NUMBERS] * 3))
            of_all = declare(builder, f"llvm.vector.reduce.add.v{STEP}i32", ir.FunctionType(_I32, [_BITS]))
            factors = _splat(builder, factor)
            # The last bit of a float of this size is worth 1: the sum is rounded to an integer, in its lowest bits.
            magic = ir.Constant(_NUMBERS, [3 * 2.0**22 + added] * STEP)

            def step(index: Any, numbers: Any, total: Any) -> Any:
                prefetch(
                    builder,
                    pointer_at(builder, builder.add(ahead, builder.mul(index, _I64(PREFETCH_PER_STEP))), 0, _I8),
                )
                bits = builder.bitcast(builder.call(fma, [numbers, factors, magic]), _BITS)
                source = builder.add(to, builder.mul(index, stride))
                builder.store(builder.trunc(bits, _CODES), pointer_at(builder, source, 0, _CODES), align=4)
                return builder.add(total, builder.sub(bits, builder.bitcast(magic, _BITS)))

            return builder.call(of_all, [_reduce(builder, x, count, _BITS(None), step)])

        return types.int32(*[types.int64] * 4, types.float32, types.int64), generate

    return write_codes


def _reduce(builder: Any, x: Any, count: Any, initial: Any, step: Any) -> Any:
    """Reduce ``count`` floats with ``step(index, numbers, total)``, ``STEP`` at a time, padded with zeros."""
    mask = ir.VectorType(ir.IntType(1), STEP)
    pointer = _NUMBERS.as_pointer()
    load = declare(
        builder, f"llvm.masked.load.v{STEP}f32.p0", ir.FunctionType(_NUMBERS, [pointer, _I32, mask, _NUMBERS])
    )
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    index, total = builder.phi(_I64), builder.phi(initial.type)
    done = builder.mul(index, _I64(STEP))
    left = _splat(builder, builder.trunc(builder.sub(count, done), _I32))
    mask_bits = builder.icmp_signed("<", ir.Constant(_BITS, list(range(STEP))), left)
    source = builder.inttoptr(builder.add(x, builder.mul(done, _I64(4))), pointer)
    new_total = step(index, builder.call(load, [source, _I32(4), mask_bits, _NUMBERS(None)]), total)
    following = builder.add(index, _I64(1))
    for phi, first, then in ((index, _I64(0), following), (total, initial, new_total)):
        phi.add_incoming(first, before)
        phi.add_incoming(then, body)
    builder.cbranch(builder.icmp_signed("<", builder.mul(following, _I64(STEP)), count), body, after)
    builder.position_at_end(after)
    return new_total


def _splat(builder: Any, value: Any) -> Any:
    """Put a value into all ``STEP`` lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, STEP), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, value, _I32(0)), undefined, _BITS(None))
