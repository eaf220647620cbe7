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

LANES = 16

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


def _merges(lane_of: Any) -> list[Any]:
    """How two vectors become two others, in each of which ``lane_of(half, lane)`` says where a lane is from."""
    return [ir.Constant(_WORDS, [lane_of(half, lane) for lane in range(LANES)]) for half in range(2)]


# Single lanes by turns, and pairs of them, within each quarter of a vector, where it is cheapest; and whole quarters.
_SINGLES = _merges(lambda half, lane: lane // 4 * 4 + 2 * half + lane % 4 // 2 + lane % 2 * LANES)
_PAIRS = _merges(lambda half, lane: lane // 4 * 4 + 2 * half + lane % 2 + lane % 4 // 2 * LANES)
_QUARTERS = _merges(lambda half, lane: lane % 4 + 4 * half + lane // 4 % 2 * 8 + lane // 8 * LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vector")


vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


@intrinsic
def load(_context: Any, _address: Any) -> Any:
    """The vector at an address."""
    return vector(types.int64), lambda _c, builder, _s, args: _load(builder, args[0])


@intrinsic
def store(_context: Any, _address: Any, _value: Any) -> Any:
    """Writes a vector to an address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _VECTOR.as_pointer()), align=4)

    return types.void(types.int64, vector), generate


@intrinsic
def prefetch(_context: Any, _address: Any) -> Any:
    """Asks for the cache line at an address, which will be read soon."""
    return types.void(types.int64), lambda _c, builder, _s, args: _prefetch(builder, args[0])


@intrinsic
def splat(_context: Any, _value: Any) -> Any:
    """A number in all lanes."""
    return vector(types.float32), lambda _c, builder, _s, args: _splat(builder, args[0])


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
    return vector(vector, vector, vector), lambda _c, builder, _s, args: _fma(builder, *args)


@intrinsic
def maximum(_context: Any, _x: Any, _y: Any) -> Any:
    """The larger of each pair; ``y`` where one is NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic
def total(_context: Any, _x: Any) -> Any:
    """The sum of the lanes."""
    return types.float32(vector), lambda _c, builder, _s, args: _halved(builder, args[0], builder.fadd)


@intrinsic
def largest(_context: Any, _x: Any) -> Any:
    """The largest lane."""

    def larger(builder: Any) -> Any:
        return lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y)

    return types.float32(vector), lambda _c, builder, _s, args: _halved(builder, args[0], larger(builder))


@intrinsic
def exceeds(_context: Any, _x: Any, _y: Any) -> Any:
    """Whether any lane of ``x`` is larger than that of ``y``."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.fcmp_ordered(">", *args), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", lanes, ir.IntType(LANES)(0))

    return types.boolean(vector, vector), generate


@intrinsic
def exp(_context: Any, _x: Any) -> Any:
    """``e ** min(x, 88)`` with a relative error of 2e-7; 0 where it is below the smallest normal number."""
    return vector(vector), lambda _c, builder, _s, args: _exp(builder, args[0])


@intrinsic
def dots(_context: Any, _query: Any, _keys: Any, _stride: Any, _chunks: Any, _ahead: Any) -> Any:
    """``(query, keys, stride, chunks, ahead)``: the products of one vector of ``chunks * 16`` numbers with sixteen,
    which begin at ``keys`` and lie ``stride`` bytes apart. Asks meanwhile for as much memory at ``ahead``."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        query, keys, stride, chunks, ahead = args
        sums = _accumulated(
            builder,
            LANES,
            chunks,
            lambda chunk: _dot_step(builder, query, keys, stride, builder.mul(chunk, _long(_BYTES)), ahead),
        )
        while len(sums) > 1:
            sums = [_neighbours(builder, *pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
        return sums[0]

    return vector(*[types.int64] * 5), generate


@intrinsic
def dot(_context: Any, _query: Any, _key: Any, _chunks: Any) -> Any:
    """``(query, key, chunks)``: the product of two vectors of ``chunks * 16`` numbers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        query, key, chunks = args

        def step(chunk: Any) -> Any:
            offset = builder.mul(chunk, _long(_BYTES))
            return [tuple(_load(builder, builder.add(place, offset)) for place in (query, key))]

        return _halved(builder, _accumulated(builder, 1, chunks, step)[0], builder.fadd)

    return types.float32(types.int64, types.int64, types.int64), generate


_BYTES = 4 * LANES


TALL = 14
"""Queries that ``score`` takes, at most: their sums and two vectors of keys fill the registers."""


def mixer(rows: int, width: int) -> Any:
    """``(out, weights, weights_stride, values, stride, count)``: adds to ``rows`` rows of ``width`` neighbouring
    vectors at ``out`` the ``count`` rows of vectors at ``values`` times their weights, of which each row of ``out`` has
    its own. Strides are in bytes; that of ``out`` is that of the values."""

    @intrinsic
    def mix(_context: Any, _out: Any, _weights: Any, _apart: Any, _values: Any, _stride: Any, _count: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            out, weights, apart, values, stride, count = args

            def place(index: Any) -> Any:
                return builder.add(values, builder.mul(index, stride))

            _mix(builder, (rows, width), out, (weights, apart), (place, stride), count)

        return types.void(*[types.int64] * 6), generate

    return mix


def block_mixer(rows: int, width: int) -> Any:
    """``(out, weights, weights_stride, blocks, offset, stride, count, ahead)``: what ``mixer`` does with values of
    which each sixteen lie together, ``offset`` bytes after one of the addresses at ``blocks``. It asks meanwhile for a
    line of memory at ``ahead`` with each: the processor foresees no jump to another page, and to ask for much at once
    would stop it."""

    @intrinsic
    def mix(
        _context: Any,
        _out: Any,
        _weights: Any,
        _apart: Any,
        _blocks: Any,
        _offset: Any,
        _stride: Any,
        _count: Any,
        _ahead: Any,
    ) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            out, weights, apart, blocks, offset, stride, count, ahead = args

            def place(index: Any) -> Any:
                _prefetch(builder, builder.add(ahead, builder.mul(index, _long(_BYTES))))
                block = builder.add(blocks, builder.mul(builder.lshr(index, _long(4)), _long(8)))
                start = builder.load(builder.inttoptr(block, ir.IntType(64).as_pointer()))
                within = builder.mul(builder.and_(index, _long(LANES - 1)), stride)
                return builder.add(start, builder.add(offset, within))

            _mix(builder, (rows, width), out, (weights, apart), (place, stride), count)

        return types.void(*[types.int64] * 8), generate

    return mix


def _mix(builder: Any, size: Any, out: Any, weighted: Any, values: Any, count: Any) -> None:
    (rows, width), (weights, apart), (place, stride) = size, weighted, values
    starts = [builder.add(out, builder.mul(stride, _long(row))) for row in range(rows)]
    places = [builder.add(start, _long(_BYTES * part)) for start in starts for part in range(width)]
    factors = [builder.add(weights, builder.mul(apart, _long(row))) for row in range(rows)]

    def step(index: Any) -> Any:
        start = place(index)
        parts = [_load(builder, builder.add(start, _long(_BYTES * part))) for part in range(width)]
        offset = builder.mul(index, _long(4))
        return [(_number(builder, builder.add(factor, offset)), part) for factor in factors for part in parts]

    begun = [_load(builder, each) for each in places]
    for each, mixed in zip(places, _accumulated(builder, len(places), count, step, begun), strict=True):
        builder.store(mixed, builder.inttoptr(each, _VECTOR.as_pointer()), align=4)


@intrinsic
def score(_context: Any, _rows: Any, _queries: Any, _keys: Any, _dim: Any, _out: Any, _apart: Any, _ahead: Any) -> Any:
    """``(rows, queries, keys, dim, out, out_stride, ahead)``: writes to up to ``TALL`` rows, ``out_stride`` bytes
    apart, the products of queries ``[dim, rows]`` with 32 keys ``[dim, 32]``. It asks meanwhile for a line of memory at
    ``ahead`` with each of ``dim``, see ``block_mixer``."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, *rest = args
        done = builder.append_basic_block()
        choice = builder.switch(rows, done)
        for some in range(1, TALL + 1):
            case = builder.append_basic_block()
            choice.add_case(_long(some), case)
            builder.position_at_end(case)
            _score(builder, some, *rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _score(builder: Any, rows: int, queries: Any, keys: Any, dim: Any, out: Any, apart: Any, ahead: Any) -> None:
    def step(index: Any) -> Any:
        _prefetch(builder, builder.add(ahead, builder.mul(index, _long(_BYTES))))
        query = builder.add(queries, builder.mul(index, _long(4 * rows)))
        key = builder.add(keys, builder.mul(index, _long(2 * _BYTES)))
        pair = [_load(builder, builder.add(key, _long(_BYTES * half))) for half in range(2)]
        values = [_number(builder, builder.add(query, _long(4 * row))) for row in range(rows)]
        return [(value, half) for value in values for half in pair]

    for index, made in enumerate(_accumulated(builder, 2 * rows, dim, step)):
        row, half = divmod(index, 2)
        place = builder.add(builder.add(out, builder.mul(apart, _long(row))), _long(_BYTES * half))
        builder.store(made, builder.inttoptr(place, _VECTOR.as_pointer()), align=4)


@intrinsic
def transpose(_context: Any, _rows: Any, _stride: Any, _out: Any, _apart: Any) -> Any:
    """``(rows, stride, out, out_stride)``: writes to ``out`` the transpose of the sixteen vectors at ``rows``. Strides
    are in bytes."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, stride, out, out_stride = args
        held = [_load(builder, builder.add(rows, builder.mul(stride, _long(row)))) for row in range(LANES)]
        for apart, merged in ((1, _SINGLES), (2, _PAIRS), (4, _QUARTERS), (8, _QUARTERS)):
            for row in range(LANES):
                if not row & apart:
                    two = held[row], held[row + apart]
                    held[row], held[row + apart] = (builder.shuffle_vector(*two, half) for half in merged)
        for index, made in enumerate(held):
            column = index & ~3 | (index & 1) << 1 | (index & 2) >> 1
            place = builder.add(out, builder.mul(out_stride, _long(column)))
            builder.store(made, builder.inttoptr(place, _VECTOR.as_pointer()), align=4)

    return types.void(*[types.int64] * 4), generate


def _dot_step(builder: Any, query: Any, keys: Any, stride: Any, offset: Any, ahead: Any) -> Any:
    part = _load(builder, builder.add(query, offset))
    place = builder.add(keys, offset)
    line = builder.add(ahead, builder.mul(offset, _long(LANES)))
    pairs = []
    for row in range(LANES):
        _prefetch(builder, builder.add(line, _long(_BYTES * row)))
        pairs.append((part, _load(builder, place)))
        place = builder.add(place, stride)
    return pairs


def _accumulated(builder: Any, width: int, count: Any, step: Any, begun: Any = None) -> Any:
    """``width`` sums of ``count`` products; ``step(index)`` gives the factors of all of them."""
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    begun = begun or [ir.Constant(_VECTOR, [0.0] * LANES)] * width
    builder.cbranch(builder.icmp_signed(">", count, _long(0)), loop, done)
    builder.position_at_end(loop)
    index = builder.phi(ir.IntType(64))
    sums = [builder.phi(_VECTOR) for _ in range(width)]
    after = [_fma(builder, x, y, held) for (x, y), held in zip(step(index), sums, strict=True)]
    following = builder.add(index, _long(1))
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    end = builder.block
    index.add_incoming(_long(0), before)
    index.add_incoming(following, end)
    builder.position_at_end(done)
    results = []
    for start, held, made in zip(begun, sums, after, strict=True):
        held.add_incoming(start, before)
        held.add_incoming(made, end)
        result = builder.phi(_VECTOR)
        result.add_incoming(start, before)
        result.add_incoming(made, end)
        results.append(result)
    return results


def _neighbours(builder: Any, x: Any, y: Any) -> Any:
    """The sums of neighbouring lanes of ``x``, and then those of ``y``."""
    even, odd = (ir.Constant(_WORDS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    return builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd))


def _halved(builder: Any, x: Any, merge: Any) -> Any:
    """The lanes merged into one: each with the one half a vector away, again and again."""
    step = LANES // 2
    while step:
        places = ir.Constant(_WORDS, [(lane + step) % LANES for lane in range(LANES)])
        x = merge(x, builder.shuffle_vector(x, x, places))
        step //= 2
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


def _exp(builder: Any, x: Any) -> Any:
    """Cody and Waite: ``x = n ln 2 + r``, a polynomial in ``r``, and ``2 ** n`` by its bits."""
    lowest, highest = _constant(-87.33), _constant(88)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    # Added to a number, leaves its nearest integer, and 127 more, in the lowest bits.
    shift = _constant((3 << 22) + 127)
    shifted = _fma(builder, x, _constant(1 / math.log(2)), shift)
    n = builder.fsub(shifted, shift)
    r = _fma(builder, n, _constant(-0.693359375), x)
    r = _fma(builder, n, _constant(2.12194440e-4), r)
    # A minimax fit of (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, weighted so that e^r is right to 1.1e-7.
    result = _constant(0.008312501)
    for coefficient in (0.04189033, 0.16667116, 0.49999231, 1, 1):
        result = _fma(builder, result, r, _constant(coefficient))
    bits = builder.shl(builder.bitcast(shifted, _WORDS), ir.Constant(_WORDS, [23] * LANES))
    result = builder.fmul(result, builder.bitcast(bits, _VECTOR))
    return builder.select(builder.fcmp_ordered("<", x, lowest), _constant(0), result)


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", x, y, z)


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(args))
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args)


def _prefetch(builder: Any, address: Any) -> None:
    name, byte, word = "llvm.prefetch.p0", ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    called = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(called, [builder.inttoptr(address, byte), *(ir.Constant(word, value) for value in (0, 3, 1))])


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _VECTOR.as_pointer()), align=4)


def _number(builder: Any, address: Any) -> Any:
    """The number at an address in all lanes."""
    return _splat(builder, builder.load(builder.inttoptr(address, _FLOAT.as_pointer())))


def _splat(builder: Any, value: Any) -> Any:
    single = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, single, ir.Constant(_WORDS, [0] * LANES))


def _constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _long(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)
