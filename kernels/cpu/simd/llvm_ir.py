"""Instructions of kernels that numba generates with vectors of sixteen float32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

LANES = 16
BYTES = 4 * LANES

FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)


def loaded(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, VECTOR.as_pointer()), align=4)


def number_at(builder: Any, address: Any) -> Any:
    """The number at an address in all lanes."""
    return splatted(builder, builder.load(builder.inttoptr(address, FLOAT.as_pointer())))


def splatted(builder: Any, value: Any, kind: Any = VECTOR) -> Any:
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, single, ir.Constant(WORDS, [0] * LANES))


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", x, y, z)


def _call(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(args))
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args)


def prefetched(builder: Any, address: Any) -> None:
    name, byte, word = "llvm.prefetch.p0", ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    called = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(called, [builder.inttoptr(address, byte), *(ir.Constant(word, value) for value in (0, 3, 1))])


def halved(builder: Any, x: Any, merge: Any) -> Any:
    """The lanes merged into one: each with the one half a vector away, again and again."""
    step = LANES // 2
    while step:
        places = ir.Constant(WORDS, [(lane + step) % LANES for lane in range(LANES)])
        x = merge(x, builder.shuffle_vector(x, x, places))
        step //= 2
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def long(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)
