"""Conversion of packed 4-bit numbers in memory to vectors of float32 and back, and the rotation before it.

Computes the same bits as ``kernels.common.int4``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.common.int4 import GROUP, MIDDLE
from kernels.cpu.simd.llvm_ir import (
    BYTES,
    LANES,
    VECTOR,
    WORDS,
    call_intrinsic,
    constant,
    load_vector,
    pointer_at,
    store_vector,
)
from kernels.cpu.simd.vector import vector

_CODES = ir.VectorType(ir.IntType(8), LANES)


def _code_loader(shift: int) -> Any:
    """Make a function that loads one half of sixteen bytes."""

    @intrinsic
    def load_codes(_context: Any, _address: Any) -> Any:
        """Return the numbers in four bits of each of sixteen bytes, from -7.5 to 7.5."""

        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            codes = builder.load(builder.inttoptr(args[0], _CODES.as_pointer()), align=1)
            words = builder.and_(builder.lshr(builder.zext(codes, WORDS), _make_word(shift)), _make_word(15))
            return builder.fsub(builder.sitofp(words, VECTOR), constant(MIDDLE))

        return vector(types.int64), generate

    return load_codes


load_low_codes, load_high_codes = _code_loader(0), _code_loader(4)


@intrinsic
def store_codes(_context: Any, _address: Any, _low: Any, _high: Any) -> Any:
    """Write the codes of two vectors, whose unit is a step, into the lower and upper halves of sixteen bytes."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        low, high = (_encode(builder, x) for x in args[1:])
        packed = builder.or_(low, builder.shl(high, _make_word(4)))
        builder.store(builder.trunc(packed, _CODES), builder.inttoptr(args[0], _CODES.as_pointer()), align=1)

    return types.void(types.int64, vector, vector), generate


def _encode(builder: Any, x: Any) -> Any:
    words = builder.fptosi(call_intrinsic(builder, "llvm.floor.v16f32", VECTOR, x), WORDS)
    words = builder.select(builder.icmp_signed("<", words, _make_word(-8)), _make_word(-8), words)
    words = builder.select(builder.icmp_signed(">", words, _make_word(7)), _make_word(7), words)
    return builder.add(words, _make_word(8))


@intrinsic
def rotate_group(_context: Any, _address: Any) -> Any:
    """Rotate the 32 numbers at an address, see ``kernels.common.int4.rotate_groups``."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> None:
        halves = [builder.add(args[0], ir.IntType(64)(BYTES * half)) for half in range(2)]
        first, second = (load_vector(builder, half) for half in halves)
        distance = 1
        while distance < LANES:
            first, second = (_add_and_subtract(builder, x, distance) for x in (first, second))
            distance *= 2
        for x, half in zip((builder.fadd(first, second), builder.fsub(first, second)), halves, strict=True):
            store_vector(builder, builder.fmul(x, constant(GROUP**-0.5)), half)

    return types.void(types.int64), generate


def _add_and_subtract(builder: Any, x: Any, distance: int) -> Any:
    """Return the sums of lanes that lie ``distance`` apart in the first lane of each pair, differences in the other."""
    lanes = range(LANES)
    partners = builder.shuffle_vector(x, x, ir.Constant(WORDS, [lane ^ distance for lane in lanes]))
    sums, differences = builder.fadd(x, partners), builder.fsub(partners, x)
    choice = [lane + LANES if lane & distance else lane for lane in lanes]
    return builder.shuffle_vector(sums, differences, ir.Constant(WORDS, choice))


@intrinsic
def load_float16(_context: Any, _address: Any) -> Any:
    """Return the float16 at an address as a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.load(pointer_at(builder, args[0], 0, ir.HalfType()), align=2), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def store_float16(_context: Any, _address: Any, _value: Any) -> Any:
    """Write a float32 as float16, rounded to nearest, ties to even; return it as it was rounded."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        half = builder.fptrunc(args[1], ir.HalfType())
        builder.store(half, pointer_at(builder, args[0], 0, ir.HalfType()), align=2)
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int64, types.float32), generate


def _make_word(value: int) -> Any:
    return constant(value, WORDS)
