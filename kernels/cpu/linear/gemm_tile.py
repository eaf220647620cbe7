"""Tiles of a matrix product, generated as LLVM instructions.

A tile is up to ``TALL`` rows by ``WIDE`` outputs, whose sums stay in registers while the columns of ``x`` and of the
weights go by: a vector of 32-bit sums for every ``LANES`` outputs. Both come in steps of 16 bytes of a row or of an
output: ``x`` as ``[steps][rows][16 bytes]``, of which four bytes at a time are broadcast to all lanes, the weights as
``[steps][4][WIDE][4 bytes]``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.availability import HAS_INT8_DOT, HAS_SIGNED_DOT, LANES
from kernels.cpu.simd.llvm_ir import (
    I64,
    call_intrinsic,
    constant,
    generate_cases,
    generate_loop,
    pointer_at,
    prefetch_line,
    splat_value,
    store_vector,
)

# The sums of a tile, one value of x and one column of weights fill the registers.
VECTORS, TALL = {16: (2, 14), 8: (2, 6), 4: (4, 6)}[LANES]
WIDE = LANES * VECTORS
_QUARTERS = 4
"""Groups of four bytes in a step."""
CACHE_LINE = 64
"""Bytes of a cache line."""
PREFETCH_BYTES = 8 << 10
"""Distance between the weights that are used and those that are prefetched into the second-level cache."""
MIN_PREFETCH_ROWS = 6
"""With this many rows the arithmetic is so slow that the hardware prefetcher stops."""


def multiplier(generate: Callable[..., None], tall: int) -> Any:
    """Make a function ``(rows, to, stride, bias, residual, x, panel, own, ahead, prefetch_stride)``.

    It contains the instructions of ``generate(builder, rows, (to, stride, bias, residual), x, panel, own, (ahead,
    prefetch_stride))`` for each number of rows up to ``tall``, and branches to those of ``rows``.
    """

    @intrinsic
    def multiply(
        _context: Any, _rows: Any, _to: Any, _stride: Any, _bias: Any, _residual: Any, _x: Any, _panel: Any, _own: Any,
        _ahead: Any, _prefetch_stride: Any,
    ) -> Any:  # fmt: skip
        def generate_all(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            rows, to, stride, bias, residual, *rest, ahead, prefetch_stride = arguments
            target, prefetching = (to, stride, bias, residual), (ahead, prefetch_stride)
            generate_cases(
                builder, rows, tall, lambda num_rows: generate(builder, num_rows, target, *rest, prefetching)
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate_all

    return multiply


def sum_tile(
    builder: Any,
    initial: Sequence[Any],
    x: Any,
    weights: Any,
    steps: Any,
    prefetching: tuple[Any, Any],
    multiply: Callable[..., Any],
    unpack: Callable[[Any], Sequence[Any]] = lambda loaded: [loaded],
    min_prefetch_rows: int = MIN_PREFETCH_ROWS,
) -> Any:
    """Generate the sums ``[rows, VECTORS]``, in that order, which begin as ``initial``.

    ``multiply(value, column, total)`` adds the products of four bytes of a row, in all lanes, and of each output to a
    sum. ``x`` and ``weights``: addresses. ``prefetching``: the address of weights to prefetch, and its increment with
    each cache line of weights that is used. ``unpack``: makes a vector of weights as they lie in memory those of one
    column or more. ``min_prefetch_rows``: with fewer rows nothing is prefetched.
    """
    rows, vector = len(initial) // VECTORS, initial[0].type
    ahead, prefetch_stride = prefetching

    def add_step(_index: Any, values: Sequence[Any]) -> Sequence[Any]:
        from_x, from_weights, prefetched, *sums = values
        read, columns = 0, deque[Any]()
        for k in range(_QUARTERS):
            if not columns:
                if rows >= min_prefetch_rows:
                    for _ in range(0, 4 * WIDE, CACHE_LINE):
                        prefetch_line(builder, prefetched, level=2)
                        prefetched = builder.add(prefetched, prefetch_stride)
                sources = [pointer_at(builder, from_weights, read + 4 * v * LANES, vector) for v in range(VECTORS)]
                columns.extend(zip(*(unpack(builder.load(source, align=4 * LANES)) for source in sources), strict=True))
                read += 4 * WIDE
            column = columns.popleft()
            for row in range(rows):
                source = pointer_at(builder, from_x, 4 * (row * _QUARTERS + k), vector.element)
                value = splat_value(builder, builder.load(source, align=4), vector)
                for v in range(VECTORS):
                    sums[row * VECTORS + v] = multiply(value, column[v], sums[row * VECTORS + v])
        following_x = builder.add(from_x, I64(4 * rows * _QUARTERS))
        return [following_x, builder.add(from_weights, I64(read)), prefetched, *sums]

    return generate_loop(builder, steps, [x, weights, ahead, *initial], add_step)[3:]


def write_tile(builder: Any, sums: Sequence[Any], target: tuple[Any, Any, Any, Any]) -> None:
    """Generate the writes of a tile, plus a bias and a residual, which are skipped if their address is 0.

    ``target``: the address of the rows, their stride in bytes, the address of the bias, the same for every row, and
    that of the residual, whose rows have the same stride.
    """
    to, stride, bias, residual = target
    for start, row_stride in ((bias, I64(0)), (residual, stride)):
        before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(builder.icmp_signed("!=", start, I64(0)), body, after)
        builder.position_at_end(body)
        added = [
            builder.fadd(
                total,
                builder.load(
                    pointer_at(builder, _tile_address(builder, index, start, row_stride), 0, total.type), align=4
                ),
            )
            for index, total in enumerate(sums)
        ]
        builder.branch(after)
        builder.position_at_end(after)
        merged = [builder.phi(total.type) for total in sums]
        for phi, total, with_summand in zip(merged, sums, added, strict=True):
            phi.add_incoming(total, before)
            phi.add_incoming(with_summand, body)
        sums = merged
    for index, total in enumerate(sums):
        store_vector(builder, total, _tile_address(builder, index, to, stride))


def _tile_address(builder: Any, index: int, start: Any, stride: Any) -> Any:
    """Return the address of a vector of a tile."""
    row = builder.add(start, builder.mul(stride, I64(index // VECTORS)))
    return builder.add(row, I64(4 * (index % VECTORS) * LANES))


def dot(builder: Any, held: Any, unsigned: Any, signed: Any, bits: int = 8) -> Any:
    """Add four products of bytes to each 32-bit sum.

    ``bits``: the most of an unsigned byte. With ``HAS_SIGNED_DOT`` they are fewer than 8, since then signed bytes can
    take its place: ``dot_signed``.
    """
    if HAS_SIGNED_DOT:
        return dot_signed(builder, held, signed, unsigned)
    if HAS_INT8_DOT:
        return call_intrinsic(builder, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", held.type, held, unsigned, signed)
    words = held.type
    if bits < 8:
        return builder.add(held, _multiply_pairs(builder, unsigned, signed, 1))
    # Two products of bytes exceed 16 bits unless one factor has 7: the lowest bit is multiplied by itself.
    upper = builder.and_(builder.lshr(unsigned, constant(1, words)), constant(0x7F7F7F7F, words))
    lowest = builder.and_(unsigned, constant(0x01010101, words))
    held = builder.add(held, _multiply_pairs(builder, upper, signed, 2))
    return builder.add(held, _multiply_pairs(builder, lowest, signed, 1))


def dot_signed(builder: Any, held: Any, x: Any, weights: Any) -> Any:
    """Add four products of signed bytes, without VNNI, to each 32-bit sum. No byte of ``x`` is -128."""
    quads = ir.VectorType(ir.IntType(8), 4 * LANES)
    zero, x, weights = quads(None), builder.bitcast(x, quads), builder.bitcast(weights, quads)
    if HAS_SIGNED_DOT:
        return call_intrinsic(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", held.type, held, x, weights)
    # The sign moves to x, so that two products have 16 bits: at most 2 * 128 * 127.
    is_negative = builder.icmp_signed("<", weights, zero)
    sizes = builder.select(is_negative, builder.sub(zero, weights), weights)
    return builder.add(held, _multiply_pairs(builder, sizes, builder.select(is_negative, builder.sub(zero, x), x), 1))


def dot_shorts(builder: Any, unsigned: Any, signed: Any) -> Any:
    """Return sums of two products of bytes, which must fit in 16 bits, without VNNI."""
    pairs, quads = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(ir.IntType(8), 4 * LANES)
    name = "llvm.x86.avx512.pmaddubs.w.512" if LANES == 16 else "llvm.x86.avx2.pmadd.ub.sw"
    return call_intrinsic(builder, name, pairs, builder.bitcast(unsigned, quads), builder.bitcast(signed, quads))


def add_shorts(builder: Any, shorts: Any, factor: int = 1) -> Any:
    """Return ``factor`` times the sum of each two 16-bit numbers, in 32 bits."""
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    words = ir.VectorType(ir.IntType(32), LANES)
    return call_intrinsic(builder, name, words, shorts, constant(factor, shorts.type))


def _multiply_pairs(builder: Any, unsigned: Any, signed: Any, factor: int) -> Any:
    """Return ``factor`` times the sum of four products of bytes. The sum of two must fit in 16 bits."""
    return add_shorts(builder, dot_shorts(builder, unsigned, signed), factor)


def keep_order(builder: Any, address: Any, values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return an address and vectors, such that nothing is read there before all of these vectors have been computed.

    LLVM else reads all columns first, which do not fit in the registers and go through memory.
    """
    kinds = [address.type, *(value.type for value in values)]
    constraints = ["=r", *["=x"] * len(values), *map(str, range(len(kinds)))]
    signature = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    kept = builder.asm(signature, "", ",".join(constraints), [address, *values], side_effect=True)
    address, *values = (builder.extract_value(kept, index) for index in range(len(kinds)))
    return address, values


def fence(builder: Any, value: Any) -> Any:
    """Keep LLVM from reordering or fusing the operations that made a vector with later ones.

    It would do so differently for different numbers of rows.
    """
    return call_intrinsic(builder, f"llvm.arithmetic.fence.v{LANES}f32", value.type, value)
