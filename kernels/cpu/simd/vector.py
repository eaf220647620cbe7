"""Vectors of sixteen float32 as values inside kernels, for code that LLVM would not vectorise by itself.

On a processor with shorter registers a vector takes several of them.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from kernels.cpu.simd.llvm_ir import (
    LANES,
    VECTOR,
    WORDS,
    constant,
    fused_multiply_add,
    load_vector,
    prefetch_line,
    reduce_lanes,
    splat_value,
    store_vector,
)


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
    """Return the vector at an address."""
    return vector(types.int64), lambda _c, builder, _s, args: load_vector(builder, args[0])


@intrinsic
def store(_context: Any, _address: Any, _value: Any) -> Any:
    """Write a vector to an address."""
    return types.void(types.int64, vector), lambda _c, builder, _s, args: store_vector(builder, args[1], args[0])


@intrinsic
def prefetch(_context: Any, _address: Any) -> Any:
    """Prefetch the cache line at an address."""
    return types.void(types.int64), lambda _c, builder, _s, args: prefetch_line(builder, args[0])


@intrinsic
def splat(_context: Any, _value: Any) -> Any:
    """Return a vector with a number in all lanes."""
    return vector(types.float32), lambda _c, builder, _s, args: splat_value(builder, args[0])


def _make_elementwise(operation: str) -> Any:
    """Make a function of two vectors from a method of LLVM's builder."""

    @intrinsic
    def apply(_context: Any, _x: Any, _y: Any) -> Any:
        return vector(vector, vector), lambda _c, builder, _s, args: getattr(builder, operation)(*args)

    return apply


add, subtract, multiply, divide = (_make_elementwise(operation) for operation in ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def maximum(_context: Any, _x: Any, _y: Any) -> Any:
    """Return the larger of each pair; ``y`` if one is NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def total(_context: Any, _x: Any) -> Any:
    """Return the sum of the lanes."""
    return types.float32(vector), lambda _c, builder, _s, args: reduce_lanes(builder, args[0], builder.fadd)


@intrinsic
def largest(_context: Any, _x: Any) -> Any:
    """Return the largest lane."""

    def larger(builder: Any) -> Any:
        return lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y)

    return types.float32(vector), lambda _c, builder, _s, args: reduce_lanes(builder, args[0], larger(builder))


@intrinsic
def exceeds(_context: Any, _x: Any, _y: Any) -> Any:
    """Return True if any lane of ``x`` is larger than that of ``y``."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_ordered(">", *args), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, ir.IntType(LANES)(0))

    return types.boolean(vector, vector), generate


@intrinsic
def between(_context: Any, _x: Any, _first: Any, _end: Any) -> Any:
    """Return the lanes from ``first`` to before ``end``, and minus infinity in the others."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, *limits = args
        lanes = ir.Constant(WORDS, list(range(LANES)))
        first, end = (splat_value(builder, builder.trunc(limit, WORDS.element), WORDS) for limit in limits)
        inside = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
        return builder.select(inside, x, constant(-math.inf))

    return vector(vector, types.int64, types.int64), generate


@intrinsic
def exp(_context: Any, _x: Any) -> Any:
    """Return ``e ** min(x, 88)`` with a relative error of 2e-7; 0 instead of denormal numbers."""
    return vector(vector), lambda _c, builder, _s, args: _exp(builder, args[0])


def _exp(builder: Any, x: Any) -> Any:
    """Compute ``e ** x`` by Cody and Waite's method: ``x = n ln 2 + r``, a polynomial in ``r``, and ``2 ** n`` by its
    bits.
    """
    lowest, highest = constant(-87.33), constant(88)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    # Added to a number, it leaves the nearest integer plus 127 in the lowest bits.
    shift = constant((3 << 22) + 127)
    shifted = fused_multiply_add(builder, x, constant(1 / math.log(2)), shift)
    n = builder.fsub(shifted, shift)
    r = fused_multiply_add(builder, n, constant(-0.693359375), x)
    r = fused_multiply_add(builder, n, constant(2.12194440e-4), r)
    # A minimax fit of (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, weighted so that e^r is right to 1.1e-7.
    result = constant(0.008312501)
    for coefficient in (0.04189033, 0.16667116, 0.49999231, 1, 1):
        result = fused_multiply_add(builder, result, r, constant(coefficient))
    bits = builder.shl(builder.bitcast(shifted, WORDS), constant(23, WORDS))
    result = builder.fmul(result, builder.bitcast(bits, VECTOR))
    return builder.select(builder.fcmp_ordered("<", x, lowest), constant(0), result)
