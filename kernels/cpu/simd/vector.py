"""Sixteen float32 as one value of a kernel, where the compiler would not find the vectors by itself.

``load`` and ``store`` take addresses in bytes. On a processor with shorter registers a value is several of them.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from kernels.cpu.simd.llvm_ir import LANES, VECTOR, WORDS, constant, fused, halved, loaded, prefetched, splatted


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vector")


vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


@intrinsic
def load(_context: Any, _address: Any) -> Any:
    """The vector at an address."""
    return vector(types.int64), lambda _c, builder, _s, args: loaded(builder, args[0])


@intrinsic
def store(_context: Any, _address: Any, _value: Any) -> Any:
    """Writes a vector to an address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], VECTOR.as_pointer()), align=4)

    return types.void(types.int64, vector), generate


@intrinsic
def prefetch(_context: Any, _address: Any) -> Any:
    """Asks for the cache line at an address, which will be read soon."""
    return types.void(types.int64), lambda _c, builder, _s, args: prefetched(builder, args[0])


@intrinsic
def splat(_context: Any, _value: Any) -> Any:
    """A number in all lanes."""
    return vector(types.float32), lambda _c, builder, _s, args: splatted(builder, args[0])


@intrinsic
def add(_context: Any, _x: Any, _y: Any) -> Any:
    """``x + y``."""
    return vector(vector, vector), lambda _c, builder, _s, args: builder.fadd(*args)


@intrinsic
def subtract(_context: Any, _x: Any, _y: Any) -> Any:
    """``x - y``."""
    return vector(vector, vector), lambda _c, builder, _s, args: builder.fsub(*args)


@intrinsic
def multiply(_context: Any, _x: Any, _y: Any) -> Any:
    """``x * y``."""
    return vector(vector, vector), lambda _c, builder, _s, args: builder.fmul(*args)


@intrinsic
def divide(_context: Any, _x: Any, _y: Any) -> Any:
    """``x / y``."""
    return vector(vector, vector), lambda _c, builder, _s, args: builder.fdiv(*args)


@intrinsic
def fma(_context: Any, _x: Any, _y: Any, _z: Any) -> Any:
    """``x * y + z``, rounded once."""
    return vector(vector, vector, vector), lambda _c, builder, _s, args: fused(builder, *args)


@intrinsic
def maximum(_context: Any, _x: Any, _y: Any) -> Any:
    """The larger of each pair; ``y`` where one is NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def total(_context: Any, _x: Any) -> Any:
    """The sum of the lanes."""
    return types.float32(vector), lambda _c, builder, _s, args: halved(builder, args[0], builder.fadd)


@intrinsic
def largest(_context: Any, _x: Any) -> Any:
    """The largest lane."""

    def larger(builder: Any) -> Any:
        return lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y)

    return types.float32(vector), lambda _c, builder, _s, args: halved(builder, args[0], larger(builder))


@intrinsic
def exceeds(_context: Any, _x: Any, _y: Any) -> Any:
    """Whether any lane of ``x`` is larger than that of ``y``."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_ordered(">", *args), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, ir.IntType(LANES)(0))

    return types.boolean(vector, vector), generate


@intrinsic
def between(_context: Any, _x: Any, _first: Any, _end: Any) -> Any:
    """The lanes ``first`` until ``end``, and minus infinity in the others."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, *limits = args
        lanes = ir.Constant(WORDS, list(range(LANES)))
        first, end = (splatted(builder, builder.trunc(limit, WORDS.element), WORDS) for limit in limits)
        inside = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
        return builder.select(inside, x, constant(-math.inf))

    return vector(vector, types.int64, types.int64), generate


@intrinsic
def exp(_context: Any, _x: Any) -> Any:
    """``e ** min(x, 88)`` with a relative error of 2e-7; 0 where it is below the smallest normal number."""
    return vector(vector), lambda _c, builder, _s, args: _exp(builder, args[0])


def _exp(builder: Any, x: Any) -> Any:
    """Cody and Waite: ``x = n ln 2 + r``, a polynomial in ``r``, and ``2 ** n`` by its bits."""
    lowest, highest = constant(-87.33), constant(88)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    # Added to a number, leaves its nearest integer, and 127 more, in the lowest bits.
    shift = constant((3 << 22) + 127)
    shifted = fused(builder, x, constant(1 / math.log(2)), shift)
    n = builder.fsub(shifted, shift)
    r = fused(builder, n, constant(-0.693359375), x)
    r = fused(builder, n, constant(2.12194440e-4), r)
    # A minimax fit of (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, weighted so that e^r is right to 1.1e-7.
    result = constant(0.008312501)
    for coefficient in (0.04189033, 0.16667116, 0.49999231, 1, 1):
        result = fused(builder, result, r, constant(coefficient))
    bits = builder.shl(builder.bitcast(shifted, WORDS), ir.Constant(WORDS, [23] * LANES))
    result = builder.fmul(result, builder.bitcast(bits, VECTOR))
    return builder.select(builder.fcmp_ordered("<", x, lowest), constant(0), result)
