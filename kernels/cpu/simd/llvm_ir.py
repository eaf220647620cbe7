"""LLVM instructions generated inside numba intrinsics, most for vectors of sixteen float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

LANES = 16
BYTES = 4 * LANES

I32, I64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(I32, LANES)


def pointer_at(builder: Any, start: Any, offset: int, kind: Any) -> Any:
    """Return a pointer ``offset`` bytes after an address."""
    return builder.inttoptr(builder.add(start, I64(offset)), kind.as_pointer())


def load_vector(builder: Any, address: Any) -> Any:
    """Load the vector at an address."""
    return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=4)


def store_vector(builder: Any, value: Any, address: Any) -> None:
    """Store a vector at an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def load_splat(builder: Any, address: Any) -> Any:
    """Load the number at an address into all lanes."""
    return splat_value(builder, builder.load(builder.inttoptr(address, FLOAT.as_pointer())))


def splat_value(builder: Any, value: Any, kind: Any = VECTOR) -> Any:
    """Put a value into all lanes of a vector of a type."""
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(single, undefined, ir.VectorType(I32, kind.count)(None))


def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call an LLVM function, which is declared once a module."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def fused_multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Compute ``x * y + z`` of vectors, rounded once."""
    return call_intrinsic(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def prefetch_line(builder: Any, address: Any, level: int = 1) -> None:
    """Prefetch the cache line at an address into the first-level or second-level cache."""
    pointer, options = pointer_at(builder, address, 0, ir.IntType(8)), (I32(0), I32(4 - level), I32(1))
    call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *options)


def reduce_lanes(builder: Any, x: Any, merge: Any) -> Any:
    """Merge all lanes into one: each with the lane half a vector away, then a quarter, and so on."""
    step = LANES // 2
    while step:
        partners = ir.Constant(WORDS, [(lane + step) % LANES for lane in range(LANES)])
        x = merge(x, builder.shuffle_vector(x, x, partners))
        step //= 2
    return builder.extract_element(x, I32(0))


def constant(value: float, kind: Any = VECTOR) -> Any:
    """Return a vector constant."""
    return ir.Constant(kind, [value] * kind.count)


def generate_loop(
    builder: Any, count: Any, initial: Sequence[Any], step: Callable[..., Sequence[Any]]
) -> Sequence[Any]:
    """Generate ``count`` times ``values = step(index, values)``, at least once; return the last values."""
    before, body, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    index, values = builder.phi(I64), [builder.phi(value.type) for value in initial]
    results = step(index, values)
    following = builder.add(index, I64(1))
    end = builder.block  # the step may consist of several blocks
    for phi, first, then in ((index, I64(0), following), *zip(values, initial, results, strict=True)):
        phi.add_incoming(first, before)
        phi.add_incoming(then, end)
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    builder.position_at_end(after)
    return results


def generate_cases(builder: Any, value: Any, most: int, generate: Callable[[int], None]) -> None:
    """Generate instructions for each number from 1 to ``most``, and a branch to those of ``value``."""
    done = builder.append_basic_block()
    choice = builder.switch(value, done)
    for number in range(1, most + 1):
        case = builder.append_basic_block()
        choice.add_case(I64(number), case)
        builder.position_at_end(case)
        generate(number)
        builder.branch(done)
    builder.position_at_end(done)
