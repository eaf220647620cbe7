"""Products of many vectors for attention: of queries with keys, and of values with weights.

Functions that take an address ``ahead`` prefetch the memory there while they compute.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.simd.llvm_ir import (
    BYTES,
    I64,
    LANES,
    WORDS,
    constant,
    fused_multiply_add,
    generate_cases,
    generate_loop,
    load_splat,
    load_vector,
    prefetch_line,
    store_vector,
)
from kernels.cpu.simd.vector import vector


def _build_shuffles(lane_of: Any) -> list[Any]:
    """Return the shuffles that make two vectors of two others; ``lane_of(half, lane)``: the source of a lane."""
    return [ir.Constant(WORDS, [lane_of(half, lane) for lane in range(LANES)]) for half in range(2)]


# Alternating lanes, and pairs of lanes, within each quarter of a vector, where shuffles are cheapest; whole quarters.
_SINGLES = _build_shuffles(lambda half, lane: lane // 4 * 4 + 2 * half + lane % 4 // 2 + lane % 2 * LANES)
_PAIRS = _build_shuffles(lambda half, lane: lane // 4 * 4 + 2 * half + lane % 2 + lane % 4 // 2 * LANES)
_QUARTERS = _build_shuffles(lambda half, lane: lane % 4 + 4 * half + lane // 4 % 2 * 8 + lane // 8 * LANES)


def dotter(lines: int) -> Any:
    """Make a function ``(query, keys, stride, chunks, ahead)`` that returns the products of a query with sixteen keys.

    The vectors have ``chunks * 16`` numbers. The keys begin at ``keys`` and lie ``stride`` bytes apart. Prefetches
    ``chunks * lines`` lines of memory at ``ahead``, in ascending order, which the hardware prefetcher expects.
    """
    group = 4
    """Products that are summed at once."""

    @intrinsic
    def dots(_context: Any, _query: Any, _keys: Any, _stride: Any, _chunks: Any, _ahead: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            query, keys, stride, chunks, ahead = args
            num_prefetched = lines * group // LANES

            def step(chunk: Any, first: int) -> Any:
                offset = builder.mul(chunk, I64(BYTES))
                part = load_vector(builder, builder.add(query, offset))
                step_index = builder.add(builder.mul(chunks, I64(first // group)), chunk)
                line = builder.add(ahead, builder.mul(step_index, I64(BYTES * num_prefetched)))
                for index in range(num_prefetched):
                    prefetch_line(builder, builder.add(line, I64(BYTES * index)))
                starts = [builder.add(keys, builder.mul(stride, I64(key))) for key in range(first, first + group)]
                return [(part, load_vector(builder, builder.add(start, offset))) for start in starts]

            sums: list[Any] = []
            for first in range(0, LANES, group):
                sums += _accumulate(builder, group, chunks, lambda chunk, first=first: step(chunk, first))
            while len(sums) > 1:
                sums = [_add_neighbours(builder, *pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
            return sums[0]

        return vector(*[types.int64] * 5), generate

    return dots


MAX_MIXED_ROWS = 4
"""The most rows that a ``mixer`` takes: the sums of four rows of four vectors fill half of the registers."""
TALL = 14
"""The most queries that ``score`` takes: their sums and two vectors of keys fill the registers."""


def block_mixer(rows: int, width: int) -> Any:
    """Make a function ``(out, weights, weights_stride, blocks, offset, stride, count, ahead)``.

    It adds ``count`` values to each of ``rows`` rows at ``out``, times the row's own weights. A row and a value are
    ``width`` neighbouring vectors. Sixteen values lie together, ``offset`` bytes after one of the addresses at
    ``blocks``. Strides are in bytes; that of ``out`` is that of the values.

    Prefetches a line of memory at ``ahead`` with each value: the hardware prefetcher stops at the end of a page, and
    many requests at once would stall the core.
    """

    @intrinsic
    def mix(
        _c: Any, _out: Any, _weights: Any, _w_stride: Any, _blocks: Any, _o: Any, _stride: Any, _count: Any, _ahead: Any
    ) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            out, weights, weights_stride, blocks, offset, stride, count, ahead = args

            def locate(index: Any) -> Any:
                prefetch_line(builder, builder.add(ahead, builder.mul(index, I64(BYTES))))
                block = builder.add(blocks, builder.mul(builder.lshr(index, I64(4)), I64(8)))
                start = builder.load(builder.inttoptr(block, I64.as_pointer()))
                within = builder.mul(builder.and_(index, I64(LANES - 1)), stride)
                return builder.add(start, builder.add(offset, within))

            _mix(builder, (rows, width), out, (weights, weights_stride), (locate, stride), count)

        return types.void(*[types.int64] * 8), generate

    return mix


def mixer(width: int) -> Any:
    """Make a function ``(rows, out, weights, weights_stride, values, stride, count, ahead)``.

    It does what ``block_mixer`` does, for 1 to ``MAX_MIXED_ROWS`` rows, with values that all lie together, and
    prefetches as much memory at ``ahead``.
    """

    @intrinsic
    def mix(
        _c: Any, _rows: Any, _out: Any, _weights: Any, _w_stride: Any, _v: Any, _stride: Any, _count: Any, _ahead: Any
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            rows, out, weights, weights_stride, values, stride, count, ahead = args

            def locate(index: Any) -> Any:
                offset = builder.mul(index, stride)
                for part in range(width):
                    prefetch_line(builder, builder.add(builder.add(ahead, offset), I64(BYTES * part)))
                return builder.add(values, offset)

            def mix_rows(num_rows: int) -> None:
                _mix(builder, (num_rows, width), out, (weights, weights_stride), (locate, stride), count)

            generate_cases(builder, rows, MAX_MIXED_ROWS, mix_rows)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return mix


def _mix(builder: Any, size: Any, out: Any, weighted: Any, values: Any, count: Any) -> None:
    (rows, width), (weights, weights_stride), (locate, stride) = size, weighted, values
    starts = [builder.add(out, builder.mul(stride, I64(row))) for row in range(rows)]
    addresses = [builder.add(start, I64(BYTES * part)) for start in starts for part in range(width)]
    factors = [builder.add(weights, builder.mul(weights_stride, I64(row))) for row in range(rows)]

    def step(index: Any) -> Any:
        start = locate(index)
        parts = [load_vector(builder, builder.add(start, I64(BYTES * part))) for part in range(width)]
        offset = builder.mul(index, I64(4))
        return [(load_splat(builder, builder.add(factor, offset)), part) for factor in factors for part in parts]

    initial = [load_vector(builder, address) for address in addresses]
    for address, mixed in zip(addresses, _accumulate(builder, len(addresses), count, step, initial), strict=True):
        store_vector(builder, mixed, address)


@intrinsic
def score(
    _context: Any, _rows: Any, _queries: Any, _keys: Any, _dim: Any, _out: Any, _out_stride: Any, _ahead: Any
) -> Any:
    """Write the dot products of up to ``TALL`` queries with 32 keys.

    Arguments ``(rows, queries, keys, dim, out, out_stride, ahead)``: ``queries`` is ``[dim, rows]``, ``keys`` ``[dim,
    32]``, and the rows of ``out`` lie ``out_stride`` bytes apart. Prefetches a line of memory at ``ahead`` with each of
    ``dim``, see ``block_mixer``.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, *rest = args
        generate_cases(builder, rows, TALL, lambda num_rows: _score(builder, num_rows, *rest))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _score(builder: Any, rows: int, queries: Any, keys: Any, dim: Any, out: Any, out_stride: Any, ahead: Any) -> None:
    def step(index: Any) -> Any:
        prefetch_line(builder, builder.add(ahead, builder.mul(index, I64(BYTES))))
        query = builder.add(queries, builder.mul(index, I64(4 * rows)))
        key = builder.add(keys, builder.mul(index, I64(2 * BYTES)))
        pair = [load_vector(builder, builder.add(key, I64(BYTES * half))) for half in range(2)]
        values = [load_splat(builder, builder.add(query, I64(4 * row))) for row in range(rows)]
        return [(value, half) for value in values for half in pair]

    for index, result in enumerate(_accumulate(builder, 2 * rows, dim, step)):
        row, half = divmod(index, 2)
        target = builder.add(builder.add(out, builder.mul(out_stride, I64(row))), I64(BYTES * half))
        store_vector(builder, result, target)


@intrinsic
def transpose(_context: Any, _rows: Any, _stride: Any, _out: Any, _out_stride: Any) -> Any:
    """Write the transpose of the sixteen vectors at ``rows`` to ``out``. Strides are in bytes."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, stride, out, out_stride = args
        vectors = [load_vector(builder, builder.add(rows, builder.mul(stride, I64(row)))) for row in range(LANES)]
        for distance, shuffles in ((1, _SINGLES), (2, _PAIRS), (4, _QUARTERS), (8, _QUARTERS)):
            for row in range(LANES):
                if not row & distance:
                    pair = vectors[row], vectors[row + distance]
                    vectors[row], vectors[row + distance] = (builder.shuffle_vector(*pair, half) for half in shuffles)
        for index, result in enumerate(vectors):
            column = index & ~3 | (index & 1) << 1 | (index & 2) >> 1
            target = builder.add(out, builder.mul(out_stride, I64(column)))
            store_vector(builder, result, target)

    return types.void(*[types.int64] * 4), generate


def _accumulate(builder: Any, width: int, count: Any, step: Any, initial: Any = None) -> Any:
    """Return ``width`` sums of ``count`` products, one or more; ``step(index)`` returns the factors of each."""

    def add_products(index: Any, sums: Any) -> Any:
        return [fused_multiply_add(builder, x, y, total) for (x, y), total in zip(step(index), sums, strict=True)]

    return generate_loop(builder, count, initial or [constant(0.0)] * width, add_products)


def _add_neighbours(builder: Any, x: Any, y: Any) -> Any:
    """Return the sums of neighbouring lanes of ``x``, followed by those of ``y``."""
    even, odd = (ir.Constant(WORDS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    return builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd))
