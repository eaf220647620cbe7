"""Rounding rows of ``x`` to 8 bits, for integer products."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.simd.llvm_ir import (
    FLOAT,
    I32,
    I64,
    call_intrinsic,
    constant,
    fused_multiply_add,
    generate_loop,
    pointer_at,
    prefetch_line,
    splat_value,
    store_vector,
)

LEVELS = 127
"""The largest code."""
STEP = 16
"""Columns that are rounded at once and lie together in a block of x, ``[in / STEP][rows][STEP]``."""
PREFETCH_PER_STEP = 32
"""Bytes that are prefetched with each step: with sixteen rows that is a panel of int8 weights."""
_TINY = 1e-30
"""The largest magnitude is at least this."""

_CODES, _BITS, _NUMBERS = (ir.VectorType(kind, STEP) for kind in (ir.IntType(8), I32, FLOAT))


@intrinsic
def largest(_context: Any, _x: Any, _count: Any) -> Any:
    """Return the largest magnitude of ``count`` floats, at least ``_TINY``; NaN if one is NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        def step(_index: Any, numbers: Any, total: Any) -> Any:
            # The bits of magnitudes order as the magnitudes do, and those of NaN are the largest.
            bits = builder.and_(builder.bitcast(numbers, _BITS), constant(0x7FFFFFFF, _BITS))
            return call_intrinsic(builder, f"llvm.umax.v{STEP}i32", _BITS, total, bits)

        x, count = arguments
        total = _reduce(builder, x, count, builder.bitcast(constant(_TINY, _NUMBERS), _BITS), step)
        return builder.bitcast(call_intrinsic(builder, f"llvm.vector.reduce.umax.v{STEP}i32", I32, total), FLOAT)

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
            factors = splat_value(builder, factor, _NUMBERS)
            # The last bit of a float of this size is worth 1: the sum is rounded to an integer, in its lowest bits.
            magic = constant(3 * 2.0**22 + added, _NUMBERS)

            def step(index: Any, numbers: Any, total: Any) -> Any:
                prefetch_line(builder, builder.add(ahead, builder.mul(index, I64(PREFETCH_PER_STEP))), level=2)
                bits = builder.bitcast(fused_multiply_add(builder, numbers, factors, magic), _BITS)
                store_vector(builder, builder.trunc(bits, _CODES), builder.add(to, builder.mul(index, stride)))
                return builder.add(total, builder.sub(bits, builder.bitcast(magic, _BITS)))

            total = _reduce(builder, x, count, _BITS(None), step)
            return call_intrinsic(builder, f"llvm.vector.reduce.add.v{STEP}i32", I32, total)

        return types.int32(*[types.int64] * 4, types.float32, types.int64), generate

    return write_codes


def _reduce(builder: Any, x: Any, count: Any, initial: Any, step: Any) -> Any:
    """Reduce ``count`` floats with ``step(index, numbers, total)``, ``STEP`` at a time, padded with zeros."""

    def load_and_step(index: Any, values: Any) -> Any:
        done = builder.mul(index, I64(STEP))
        left = splat_value(builder, builder.trunc(builder.sub(count, done), I32), _BITS)
        mask = builder.icmp_signed("<", ir.Constant(_BITS, list(range(STEP))), left)
        source = pointer_at(builder, builder.add(x, builder.mul(done, I64(4))), 0, _NUMBERS)
        name = f"llvm.masked.load.v{STEP}f32.p0"
        numbers = call_intrinsic(builder, name, _NUMBERS, source, I32(4), mask, _NUMBERS(None))
        return [step(index, numbers, values[0])]

    num_steps = builder.sdiv(builder.add(count, I64(STEP - 1)), I64(STEP))
    return generate_loop(builder, num_steps, [initial], load_and_step)[0]
