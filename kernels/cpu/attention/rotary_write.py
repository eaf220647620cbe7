"""What comes before attention to the paged cache: normalising and turning queries and keys, writing keys and values.

For the layouts see ``kernels.cpu.attention.paged``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.cpu.attention.keys import KINDS, SOME, STEP_WORDS
from kernels.cpu.runtime.kernel import (
    as_float,
    float32_array,
    function,
    int64_array,
    kernel,
    read_arguments,
    split_range,
)
from kernels.cpu.simd.convert_8bit import magnitude, store_float8, store_int8
from kernels.cpu.simd.vector import add, divide, largest, load, maximum, multiply, splat, store, total

_INT8 = KINDS[torch.int8]


@kernel
def rotary_write(address: Any) -> None:
    """``(qkv, weight, eps, cos, sin, step, cache, scales, kind, tokens, heads, kv_heads, dim, turned, capacity)``:
    normalises queries and keys in place unless ``weight`` (``[heads + kv_heads, dim]``) is 0, turns their first
    ``turned`` coordinates by ``cos`` and ``sin`` (``[tokens, turned]``, see ``rotary_tables``), and writes keys and
    values into ``cache`` of ``capacity`` slots at ``slots`` ``[tokens]`` of the ``step`` that ``attend`` takes.
    ``kind``: one of ``KINDS``; ``scales`` are 0 for float32."""
    a, thread, threads = read_arguments(address)
    tokens, heads, kv_heads, dim, turned, capacity = a[9], a[10], a[11], a[12], a[13], a[14]
    turning, half = heads + kv_heads, turned // 2
    qkv, weight = float32_array(a[0], (tokens, turning + kv_heads, dim)), float32_array(a[1], (turning, dim))
    cos, sin = float32_array(a[3], (tokens, turned)), float32_array(a[4], (tokens, turned))
    slots = int64_array(int64_array(a[5], STEP_WORDS)[16], tokens)
    first, end = split_range(tokens, thread, threads)
    for token in range(first, end):
        slot = slots[token]
        for head in range(turning):
            x = qkv[token, head]
            if a[1]:
                squares = np.float32(0)
                for i in range(dim):
                    squares += x[i] * x[i]
                factor = np.float32(1 / np.sqrt(np.float64(squares) / dim + as_float(a[2])))
                for i in range(dim):
                    x[i] = x[i] * factor * weight[head, i]
            for i in range(half):
                left, right = x[i], x[i + half]
                x[i] = left * cos[token, i] + right * sin[token, i]
                x[i + half] = right * cos[token, i + half] + left * sin[token, i + half]
        for kept in range(2 * kv_heads):
            source = a[0] + 4 * dim * (token * (turning + kv_heads) + heads + kept)
            _write(source, dim, kept * capacity + slot, a[6], a[7], a[8])


@function
def _write(source: int, dim: int, place: int, cache: int, scales: int, kind: int) -> None:
    """Writes one key or value to its ``place``, counted through all heads."""
    if kind == 0:
        for i in range(0, 4 * dim, 64):
            store(cache + 4 * dim * place + i, load(source + i))
        return
    top = nothing = splat(np.float32(0))
    for i in range(0, 4 * dim, 64):
        part = load(source + i)
        top, nothing = maximum(magnitude(part), top), add(nothing, multiply(part, splat(np.float32(0))))
    limit = np.float32(127) if kind == _INT8 else np.float32(448)
    # What is no number must not become one.
    scale = max(largest(top), np.float32(1e-20)) / limit + total(nothing)
    float32_array(scales, SOME)[place] = scale
    for i in range(0, dim, 16):
        part = divide(load(source + 4 * i), splat(scale))
        if kind == _INT8:
            store_int8(cache + dim * place + i, part)
        else:
            store_float8(cache + dim * place + i, part)
