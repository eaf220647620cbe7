"""Tiles of a matrix product: up to ``TALL`` rows by ``WIDE`` outputs, whose sums stay in registers while the columns of
``x`` and of the weights go by, a vector of 32-bit sums for every ``LANES`` outputs.

Both come in steps of 16 bytes of a row or of an output: ``x`` as ``[steps][rows][16 bytes]``, of which a lane takes
four at a time, the weights as ``[steps][4][WIDE][4 bytes]``.
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
"""Times that a step is multiplied."""
LINE = 64
"""Bytes of a line of the cache."""
AHEAD = 8 << 10
"""Bytes of weights between what is used and what is fetched into the cache of the second level."""
_FETCHES = 6
"""From so many rows on, the arithmetic is slow enough to let the processor forget to read ahead by itself."""
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def multiplier(generate: Callable[..., None], tall: int) -> Any:
    """``(rows, to, stride, bias, residual, x, panel, own, ahead, apart)``: the instructions of ``generate(builder,
    rows, (to, stride, bias, residual), x, panel, own, (ahead, apart))`` for each number of rows up to ``tall``, of
    which ``rows`` chooses one."""

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
        _apart: Any,
    ) -> Any:
        def heights(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            rows, to, stride, bias, residual, *rest, ahead, apart = arguments
            done = builder.append_basic_block()
            choice = builder.switch(rows, done)
            for some in range(1, tall + 1):
                case = builder.append_basic_block()
                choice.add_case(_I64(some), case)
                builder.position_at_end(case)
                generate(builder, some, (to, stride, bias, residual), *rest, (ahead, apart))
                builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), heights

    return multiply


def tile(
    builder: Any,
    begun: Sequence[Any],
    x: Any,
    weights: Any,
    steps: Any,
    fetch: tuple[Any, Any],
    multiply: Callable[..., Any],
    unpack: Callable[[Any], Sequence[Any]] = lambda loaded: [loaded],
    fetches: int = _FETCHES,
) -> Any:
    """The sums ``[rows, VECTORS]``, one after the other, which begin as ``begun``.

    ``multiply(value, column, held)``: a sum after another 4 bytes of a row, in all lanes, and of each output. ``x`` and
    ``weights``: addresses. ``fetch``: where the weights are that it asks for meanwhile, and how many bytes further with
    each line that it uses. ``unpack``: a vector of weights as they lie in memory, as those of one column or more.
    ``fetches``: from so many rows on it asks for weights ahead.
    """
    rows, vector = len(begun) // VECTORS, begun[0].type
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    step, from_x, from_weights, from_ahead = (builder.phi(_I64) for _ in range(4))
    starts = [builder.phi(vector) for _ in begun]
    sums, read, columns = list(starts), 0, deque[Any]()
    asked, (ahead, apart) = from_ahead, fetch
    for k in range(_QUARTERS):
        if not columns:
            if rows >= fetches:
                for _ in range(0, 4 * WIDE, LINE):
                    prefetch(builder, at(builder, asked, 0, ir.IntType(8)))
                    asked = builder.add(asked, apart)
            places = [at(builder, from_weights, read + 4 * v * LANES, vector) for v in range(VECTORS)]
            columns.extend(zip(*(unpack(builder.load(place, align=4 * LANES)) for place in places), strict=True))
            read += 4 * WIDE
        column = columns.popleft()
        for row in range(rows):
            place = at(builder, from_x, 4 * (row * _QUARTERS + k), vector.element)
            value = broadcast(builder, builder.load(place, align=4))
            for v in range(VECTORS):
                sums[row * VECTORS + v] = multiply(value, column[v], sums[row * VECTORS + v])
    left = builder.sub(step, _I64(1))
    for phi, first, following in (
        (step, steps, left),
        (from_x, x, builder.add(from_x, _I64(4 * rows * _QUARTERS))),
        (from_weights, weights, builder.add(from_weights, _I64(read))),
        (from_ahead, ahead, asked),
        *zip(starts, begun, sums, strict=True),
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed(">", left, _I64(0)), body, after)
    builder.position_at_end(after)
    return sums


def write(builder: Any, tiled: Sequence[Any], target: tuple[Any, Any, Any, Any]) -> None:
    """Writes a tile to rows of an address, a stride in bytes apart, and adds what lies at two other addresses: the same
    for every row, and rows as far apart as those that are written. Nothing is added of what lies at 0."""
    to, stride, bias, residual = target
    for start, apart in ((bias, _I64(0)), (residual, stride)):
        before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(builder.icmp_signed("!=", start, _I64(0)), body, after)
        builder.position_at_end(body)
        added = [
            builder.fadd(one, builder.load(_place(builder, index, start, apart, one.type), align=4))
            for index, one in enumerate(tiled)
        ]
        builder.branch(after)
        builder.position_at_end(after)
        merged = [builder.phi(one.type) for one in tiled]
        for phi, one, other in zip(merged, tiled, added, strict=True):
            phi.add_incoming(one, before)
            phi.add_incoming(other, body)
        tiled = merged
    for index, vector in enumerate(tiled):
        builder.store(vector, _place(builder, index, to, stride, vector.type), align=4)


def _place(builder: Any, index: int, start: Any, stride: Any, kind: Any) -> Any:
    """A pointer to a vector of a tile."""
    row = builder.add(start, builder.mul(stride, _I64(index // VECTORS)))
    return at(builder, row, 4 * (index % VECTORS) * LANES, kind)


def dot(builder: Any, held: Any, unsigned: Any, signed: Any) -> Any:
    """32-bit sums after four products of bytes each."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
    return builder.call(external(builder, name, ir.FunctionType(held.type, [held.type] * 3)), [held, unsigned, signed])


def fence(builder: Any, value: Any) -> Any:
    """A vector of floats that the compiler does not look behind: it may multiply and add in another order, and in
    another for another number of rows."""
    name = f"llvm.arithmetic.fence.v{LANES}f32"
    return builder.call(external(builder, name, ir.FunctionType(value.type, [value.type])), [value])


def at(builder: Any, start: Any, offset: int, kind: Any) -> Any:
    """A pointer to what lies ``offset`` bytes after an address."""
    return builder.inttoptr(builder.add(start, _I64(offset)), kind.as_pointer())


def broadcast(builder: Any, value: Any) -> Any:
    """A value in all lanes."""
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, value, _I32(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def external(builder: Any, name: str, kind: Any) -> Any:
    """The declaration of a function of LLVM's."""
    declared = builder.module.globals.get(name)
    return declared if declared is not None else ir.Function(builder.module, kind, name)


def prefetch(builder: Any, line: Any) -> None:
    """Asks for a line of memory, into the cache of the second level."""
    called = external(builder, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [line.type, _I32, _I32, _I32]))
    builder.call(called, [line, _I32(0), _I32(2), _I32(1)])
