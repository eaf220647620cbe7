"""LLVM instructions for vectors of sixteen float32, generated inside numba intrinsics."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

LANES = 16
BYTES = 4 * LANES

FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)


def load_vector(builder: Any, address: Any) -> Any:
    """Load the vector at an address."""
    return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=4)


def load_splat(builder: Any, address: Any) -> Any:
    """Load the number at an address into all lanes."""
    return splat_value(builder, builder.load(builder.inttoptr(address, FLOAT.as_pointer())))


def splat_value(builder: Any, value: Any, kind: Any = VECTOR) -> Any:
    """Put a value into all lanes."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, single, ir.Constant(WORDS, [0] * LANES))


def fused_multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Compute ``x * y + z``, rounded once."""
    return _call(builder, "llvm.fma.v16f32", x, y, z)


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args)


def prefetch_line(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address into the first-level cache."""
    name, byte, word = "llvm.prefetch.p0", ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    called = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(called, [builder.inttoptr(address, byte), *(ir.Constant(word, value) for value in (0, 3, 1))])


def reduce_lanes(builder: Any, x: Any, merge: Any) -> Any:
    """Merge all lanes into one: each with the lane half a vector away, then a quarter, and so on."""
    step = LANES // 2
    while step:
        partners = ir.Constant(WORDS, [(lane + step) % LANES for lane in range(LANES)])
        x = merge(x, builder.shuffle_vector(x, x, partners))
        step //= 2
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


def constant(value: float) -> Any:
    """Return a vector constant."""
    return ir.Constant(VECTOR, [value] * LANES)


def int64(value: int) -> Any:
    """Return a 64-bit constant."""
    return ir.Constant(ir.IntType(64), value)
