"""Products of many vectors at once, as attention needs them: a query's or some queries' with keys, and values' with
weights. What takes an address ``ahead`` asks meanwhile for the memory that lies there."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.simd.llvm_ir import BYTES, LANES, VECTOR, WORDS, fused, loaded, long, number_at, prefetched
from kernels.cpu.simd.vector import vector


def _merges(lane_of: Any) -> list[Any]:
    """How two vectors become two others, in each of which ``lane_of(half, lane)`` says where a lane is from."""
    return [ir.Constant(WORDS, [lane_of(half, lane) for lane in range(LANES)]) for half in range(2)]


# Single lanes by turns, and pairs of them, within each quarter of a vector, where it is cheapest; and whole quarters.
_SINGLES = _merges(lambda half, lane: lane // 4 * 4 + 2 * half + lane % 4 // 2 + lane % 2 * LANES)
_PAIRS = _merges(lambda half, lane: lane // 4 * 4 + 2 * half + lane % 2 + lane % 4 // 2 * LANES)
_QUARTERS = _merges(lambda half, lane: lane % 4 + 4 * half + lane // 4 % 2 * 8 + lane // 8 * LANES)


def dotter(lines: int) -> Any:
    """``(query, keys, stride, chunks, ahead)``: the products of one vector of ``chunks * 16`` numbers with sixteen,
    which begin at ``keys`` and lie ``stride`` bytes apart. Asks meanwhile for ``chunks * lines`` lines of memory at
    ``ahead``. Both are read from their beginning to their end, as the processor expects it of memory."""
    some = 4
    """Products at once."""

    @intrinsic
    def dots(_context: Any, _query: Any, _keys: Any, _stride: Any, _chunks: Any, _ahead: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            query, keys, stride, chunks, ahead = args
            asked = lines * some // LANES

            def step(chunk: Any, first: int) -> Any:
                offset = builder.mul(chunk, long(BYTES))
                part = loaded(builder, builder.add(query, offset))
                line = builder.add(builder.mul(chunks, long(first // some)), chunk)
                for each in range(asked):
                    prefetched(
                        builder,
                        builder.add(ahead, builder.add(builder.mul(line, long(BYTES * asked)), long(BYTES * each))),
                    )
                places = [builder.add(keys, builder.mul(stride, long(key))) for key in range(first, first + some)]
                return [(part, loaded(builder, builder.add(place, offset))) for place in places]

            sums = []
            for first in range(0, LANES, some):
                sums += _accumulated(builder, some, chunks, lambda chunk, first=first: step(chunk, first))
            while len(sums) > 1:
                sums = [_neighbours(builder, *pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
            return sums[0]

        return vector(*[types.int64] * 5), generate

    return dots


TALL = 14
"""Queries that ``score`` takes, at most: their sums and two vectors of keys fill the registers."""


def block_mixer(rows: int, width: int) -> Any:
    """``(out, weights, weights_stride, blocks, offset, stride, count, ahead)``: adds to ``rows`` rows of ``width``
    neighbouring vectors at ``out`` the ``count`` rows of vectors of values times their weights, of which each row of
    ``out`` has its own. Each sixteen values lie together, ``offset`` bytes after one of the addresses at ``blocks``.
    Strides are in bytes; that of ``out`` is that of the values.

    It asks meanwhile for a line of memory at ``ahead`` with each value: the processor foresees no jump to another page,
    and to ask for much at once would stop it."""

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
                prefetched(builder, builder.add(ahead, builder.mul(index, long(BYTES))))
                block = builder.add(blocks, builder.mul(builder.lshr(index, long(4)), long(8)))
                start = builder.load(builder.inttoptr(block, ir.IntType(64).as_pointer()))
                within = builder.mul(builder.and_(index, long(LANES - 1)), stride)
                return builder.add(start, builder.add(offset, within))

            _mix(builder, (rows, width), out, (weights, apart), (place, stride), count)

        return types.void(*[types.int64] * 8), generate

    return mix


def mixer(rows: int, width: int) -> Any:
    """``(out, weights, weights_stride, values, stride, count, ahead)``: what ``block_mixer`` does with values that all
    lie together. It asks meanwhile for as much memory at ``ahead``."""

    @intrinsic
    def mix(
        _context: Any, _out: Any, _weights: Any, _apart: Any, _values: Any, _stride: Any, _count: Any, _ahead: Any
    ) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            out, weights, apart, values, stride, count, ahead = args

            def place(index: Any) -> Any:
                offset = builder.mul(index, stride)
                for part in range(width):
                    prefetched(builder, builder.add(builder.add(ahead, offset), long(BYTES * part)))
                return builder.add(values, offset)

            _mix(builder, (rows, width), out, (weights, apart), (place, stride), count)

        return types.void(*[types.int64] * 7), generate

    return mix


def _mix(builder: Any, size: Any, out: Any, weighted: Any, values: Any, count: Any) -> None:
    (rows, width), (weights, apart), (place, stride) = size, weighted, values
    starts = [builder.add(out, builder.mul(stride, long(row))) for row in range(rows)]
    places = [builder.add(start, long(BYTES * part)) for start in starts for part in range(width)]
    factors = [builder.add(weights, builder.mul(apart, long(row))) for row in range(rows)]

    def step(index: Any) -> Any:
        start = place(index)
        parts = [loaded(builder, builder.add(start, long(BYTES * part))) for part in range(width)]
        offset = builder.mul(index, long(4))
        return [(number_at(builder, builder.add(factor, offset)), part) for factor in factors for part in parts]

    begun = [loaded(builder, each) for each in places]
    for each, mixed in zip(places, _accumulated(builder, len(places), count, step, begun), strict=True):
        builder.store(mixed, builder.inttoptr(each, VECTOR.as_pointer()), align=4)


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
            choice.add_case(long(some), case)
            builder.position_at_end(case)
            _score(builder, some, *rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _score(builder: Any, rows: int, queries: Any, keys: Any, dim: Any, out: Any, apart: Any, ahead: Any) -> None:
    def step(index: Any) -> Any:
        prefetched(builder, builder.add(ahead, builder.mul(index, long(BYTES))))
        query = builder.add(queries, builder.mul(index, long(4 * rows)))
        key = builder.add(keys, builder.mul(index, long(2 * BYTES)))
        pair = [loaded(builder, builder.add(key, long(BYTES * half))) for half in range(2)]
        values = [number_at(builder, builder.add(query, long(4 * row))) for row in range(rows)]
        return [(value, half) for value in values for half in pair]

    for index, made in enumerate(_accumulated(builder, 2 * rows, dim, step)):
        row, half = divmod(index, 2)
        place = builder.add(builder.add(out, builder.mul(apart, long(row))), long(BYTES * half))
        builder.store(made, builder.inttoptr(place, VECTOR.as_pointer()), align=4)


@intrinsic
def transpose(_context: Any, _rows: Any, _stride: Any, _out: Any, _apart: Any) -> Any:
    """``(rows, stride, out, out_stride)``: writes to ``out`` the transpose of the sixteen vectors at ``rows``. Strides
    are in bytes."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, stride, out, out_stride = args
        held = [loaded(builder, builder.add(rows, builder.mul(stride, long(row)))) for row in range(LANES)]
        for apart, merged in ((1, _SINGLES), (2, _PAIRS), (4, _QUARTERS), (8, _QUARTERS)):
            for row in range(LANES):
                if not row & apart:
                    two = held[row], held[row + apart]
                    held[row], held[row + apart] = (builder.shuffle_vector(*two, half) for half in merged)
        for index, made in enumerate(held):
            column = index & ~3 | (index & 1) << 1 | (index & 2) >> 1
            place = builder.add(out, builder.mul(out_stride, long(column)))
            builder.store(made, builder.inttoptr(place, VECTOR.as_pointer()), align=4)

    return types.void(*[types.int64] * 4), generate


def _accumulated(builder: Any, width: int, count: Any, step: Any, begun: Any = None) -> Any:
    """``width`` sums of ``count`` products; ``step(index)`` gives the factors of all of them."""
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    begun = begun or [ir.Constant(VECTOR, [0.0] * LANES)] * width
    builder.cbranch(builder.icmp_signed(">", count, long(0)), loop, done)
    builder.position_at_end(loop)
    index = builder.phi(ir.IntType(64))
    sums = [builder.phi(VECTOR) for _ in range(width)]
    after = [fused(builder, x, y, held) for (x, y), held in zip(step(index), sums, strict=True)]
    following = builder.add(index, long(1))
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    end = builder.block
    index.add_incoming(long(0), before)
    index.add_incoming(following, end)
    builder.position_at_end(done)
    results = []
    for start, held, made in zip(begun, sums, after, strict=True):
        held.add_incoming(start, before)
        held.add_incoming(made, end)
        result = builder.phi(VECTOR)
        result.add_incoming(start, before)
        result.add_incoming(made, end)
        results.append(result)
    return results


def _neighbours(builder: Any, x: Any, y: Any) -> Any:
    """The sums of neighbouring lanes of ``x``, and then those of ``y``."""
    even, odd = (ir.Constant(WORDS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    return builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd))
