"""Conversion of sixteen int8 or float8 (e4m3) numbers in memory to a ``vector`` of float32 and back.

Rounds to nearest, ties to even, as ``kernels.quantize.quantize_vectors``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.simd.llvm_ir import LANES, VECTOR, WORDS, call_intrinsic, constant
from kernels.cpu.simd.vector import vector

_BYTES = ir.VectorType(ir.IntType(8), LANES)
_SMALLEST_NORMAL = 2.0**-6
"""The smallest normal float8."""
_DENORMALS_PER_ONE = 2.0**9
"""Denormal float8 numbers are multiples of its reciprocal."""
_BIAS = 127 - 7
"""Difference of the exponent biases of float32 and float8."""
_CUT = 23 - 3
"""Fraction bits of a float32 that a float8 lacks."""


@intrinsic
def load_int8(_context: Any, _address: Any) -> Any:
    """Return the int8 numbers at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sitofp(builder.sext(_load(builder, args[0]), WORDS), VECTOR)

    return vector(types.int64), generate


@intrinsic
def load_float8(_context: Any, _address: Any) -> Any:
    """Return the float8 numbers at an address; NaN becomes 480."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        code = builder.sext(_load(builder, args[0]), WORDS)
        bits = builder.shl(builder.and_(code, _make_word(0x7F)), _make_word(_CUT))
        normal = builder.bitcast(builder.add(bits, _make_word(_BIAS << 23)), VECTOR)
        # A denormal number has the exponent of the smallest normal one, without the leading 1.
        small = builder.bitcast(builder.add(bits, _make_word((_BIAS + 1) << 23)), VECTOR)
        small = builder.fsub(small, constant(_SMALLEST_NORMAL))
        size = builder.select(builder.icmp_unsigned("<", bits, _make_word(1 << 23)), small, normal)
        sign = builder.and_(code, _make_word(1 << 31))
        return builder.bitcast(builder.or_(builder.bitcast(size, WORDS), sign), VECTOR)

    return vector(types.int64), generate


@intrinsic
def store_int8(_context: Any, _address: Any, _value: Any) -> Any:
    """Write numbers of at most 127 in magnitude as int8."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _store(builder, builder.fptosi(_round(builder, args[1]), WORDS), args[0])

    return types.void(types.int64, vector), generate


@intrinsic
def store_float8(_context: Any, _address: Any, _value: Any) -> Any:
    """Write numbers of at most 448 in magnitude as float8."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[1], WORDS)
        whole = builder.and_(bits, _make_word(0x7FFFFFFF))
        odd = builder.and_(builder.lshr(whole, _make_word(_CUT)), _make_word(1))
        rounded = builder.add(builder.add(whole, odd), _make_word((1 << (_CUT - 1)) - 1))
        normal = builder.sub(builder.lshr(rounded, _make_word(_CUT)), _make_word(_BIAS << 3))
        size = builder.bitcast(whole, VECTOR)
        # The codes of denormal numbers count up to that of the smallest normal one.
        small = builder.fptosi(_round(builder, builder.fmul(size, constant(_DENORMALS_PER_ONE))), WORDS)
        code = builder.select(builder.fcmp_ordered("<", size, constant(_SMALLEST_NORMAL)), small, normal)
        sign = builder.and_(builder.lshr(bits, _make_word(24)), _make_word(0x80))
        _store(builder, builder.or_(code, sign), args[0])

    return types.void(types.int64, vector), generate


@intrinsic
def magnitude(_context: Any, _x: Any) -> Any:
    """Return ``|x|``."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.and_(builder.bitcast(args[0], WORDS), _make_word(0x7FFFFFFF)), VECTOR)

    return vector(vector), generate


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _BYTES.as_pointer()), align=1)


def _store(builder: Any, code: Any, address: Any) -> None:
    builder.store(builder.trunc(code, _BYTES), builder.inttoptr(address, _BYTES.as_pointer()), align=1)


def _round(builder: Any, x: Any) -> Any:
    return call_intrinsic(builder, "llvm.nearbyint.v16f32", VECTOR, x)


def _make_word(value: int) -> Any:
    return constant(value, WORDS)
