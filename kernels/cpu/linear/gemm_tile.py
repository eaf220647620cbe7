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

from kernels.cpu.availability import LANES

# The sums of a tile, one value of x and one column of weights fill the registers.
VECTORS, TALL = {16: (2, 14), 8: (2, 6), 4: (4, 6)}[LANES]
WIDE = LANES * VECTORS
_QUARTERS = 4
"""Groups of four bytes in a step."""
CACHE_LINE = 64
"""Bytes of a cache line."""
PREFETCH_BYTES = 8 << 10
"""Distance between the weights that are used and those that are prefetched into the second-level cache."""
_MIN_PREFETCH_ROWS = 6
"""With this many rows the arithmetic is so slow that the hardware prefetcher stops."""
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def multiplier(generate: Callable[..., None], tall: int) -> Any:
    """Make a function ``(rows, to, stride, bias, residual, x, panel, own, ahead, prefetch_stride)``.

    It contains the instructions of ``generate(builder, rows, (to, stride, bias, residual), x, panel, own, (ahead,
    prefetch_stride))`` for each number of rows up to ``tall``, and branches to those of ``rows``.
    """

    @intrinsic
    def multiply(
        _context: Any,
        _rows: Any,
        _to: Any,
        _stride: Any,
        _bias: Any,
        _residual: Any,
        _x: Any,
        _panel: Any,
        _own: Any,
        _ahead: Any,
        _prefetch_stride: Any,
    ) -> Any:
        def generate_all(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            rows, to, stride, bias, residual, *rest, ahead, prefetch_stride = arguments
            done = builder.append_basic_block()
            choice = builder.switch(rows, done)
            for num_rows in range(1, tall + 1):
                case = builder.append_basic_block()
                choice.add_case(_I64(num_rows), case)
                builder.position_at_end(case)
                generate(builder, num_rows, (to, stride, bias, residual), *rest, (ahead, prefetch_stride))
                builder.branch(done)
            builder.position_at_end(done)
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
    min_prefetch_rows: int = _MIN_PREFETCH_ROWS,
) -> Any:
    """Generate the sums ``[rows, VECTORS]``, in that order, which begin as ``initial``.

    ``multiply(value, column, total)`` adds the products of four bytes of a row, in all lanes, and of each output to a
    sum. ``x`` and ``weights``: addresses. ``prefetching``: the address of weights to prefetch, and its increment with
    each cache line of weights that is used. ``unpack``: makes a vector of weights as they lie in memory those of one
    column or more. ``min_prefetch_rows``: with fewer rows nothing is prefetched.
    """
    rows, vector = len(initial) // VECTORS, initial[0].type
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    step, from_x, from_weights, from_ahead = (builder.phi(_I64) for _ in range(4))
    starts = [builder.phi(vector) for _ in initial]
    sums, read, columns = list(starts), 0, deque[Any]()
    prefetched, (ahead, prefetch_stride) = from_ahead, prefetching
    for k in range(_QUARTERS):
        if not columns:
            if rows >= min_prefetch_rows:
                for _ in range(0, 4 * WIDE, CACHE_LINE):
                    prefetch(builder, pointer_at(builder, prefetched, 0, ir.IntType(8)))
                    prefetched = builder.add(prefetched, prefetch_stride)
            sources = [pointer_at(builder, from_weights, read + 4 * v * LANES, vector) for v in range(VECTORS)]
            columns.extend(zip(*(unpack(builder.load(source, align=4 * LANES)) for source in sources), strict=True))
            read += 4 * WIDE
        column = columns.popleft()
        for row in range(rows):
            source = pointer_at(builder, from_x, 4 * (row * _QUARTERS + k), vector.element)
            value = broadcast(builder, builder.load(source, align=4))
            for v in range(VECTORS):
                sums[row * VECTORS + v] = multiply(value, column[v], sums[row * VECTORS + v])
    left = builder.sub(step, _I64(1))
    for phi, first, following in (
        (step, steps, left),
        (from_x, x, builder.add(from_x, _I64(4 * rows * _QUARTERS))),
        (from_weights, weights, builder.add(from_weights, _I64(read))),
        (from_ahead, ahead, prefetched),
        *zip(starts, initial, sums, strict=True),
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed(">", left, _I64(0)), body, after)
    builder.position_at_end(after)
    return sums


def write_tile(builder: Any, sums: Sequence[Any], target: tuple[Any, Any, Any, Any]) -> None:
    """Generate the writes of a tile, plus a bias and a residual, which are skipped if their address is 0.

    ``target``: the address of the rows, their stride in bytes, the address of the bias, the same for every row, and
    that of the residual, whose rows have the same stride.
    """
    to, stride, bias, residual = target
    for start, row_stride in ((bias, _I64(0)), (residual, stride)):
        before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(builder.icmp_signed("!=", start, _I64(0)), body, after)
        builder.position_at_end(body)
        added = [
            builder.fadd(total, builder.load(_tile_pointer(builder, index, start, row_stride, total.type), align=4))
            for index, total in enumerate(sums)
        ]
        builder.branch(after)
        builder.position_at_end(after)
        merged = [builder.phi(total.type) for total in sums]
        for phi, total, with_summand in zip(merged, sums, added, strict=True):
            phi.add_incoming(total, before)
            phi.add_incoming(with_summand, body)
        sums = merged
    for index, vector in enumerate(sums):
        builder.store(vector, _tile_pointer(builder, index, to, stride, vector.type), align=4)


def _tile_pointer(builder: Any, index: int, start: Any, stride: Any, kind: Any) -> Any:
    """Return a pointer to a vector of a tile."""
    row = builder.add(start, builder.mul(stride, _I64(index // VECTORS)))
    return pointer_at(builder, row, 4 * (index % VECTORS) * LANES, kind)


def dot(builder: Any, held: Any, unsigned: Any, signed: Any) -> Any:
    """Add four products of bytes to each 32-bit sum."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
    return builder.call(declare(builder, name, ir.FunctionType(held.type, [held.type] * 3)), [held, unsigned, signed])


def fence(builder: Any, value: Any) -> Any:
    """Keep LLVM from reordering or fusing the operations that made a vector with later ones.

    It would do so differently for different numbers of rows.
    """
    name = f"llvm.arithmetic.fence.v{LANES}f32"
    return builder.call(declare(builder, name, ir.FunctionType(value.type, [value.type])), [value])


def pointer_at(builder: Any, start: Any, offset: int, kind: Any) -> Any:
    """Return a pointer ``offset`` bytes after an address."""
    return builder.inttoptr(builder.add(start, _I64(offset)), kind.as_pointer())


def broadcast(builder: Any, value: Any) -> Any:
    """Put a value into all lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    single = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def declare(builder: Any, name: str, kind: Any) -> Any:
    """Return the declaration of an LLVM function, declared once a module."""
    declared = builder.module.globals.get(name)
    return declared if declared is not None else ir.Function(builder.module, kind, name)


def prefetch(builder: Any, line: Any) -> None:
    """Prefetch a cache line into the second-level cache."""
    called = declare(builder, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [line.type, _I32, _I32, _I32]))
    builder.call(called, [line, _I32(0), _I32(2), _I32(1)])
