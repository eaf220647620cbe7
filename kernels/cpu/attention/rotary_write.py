"""Before attention to the paged cache: normalise and rotate queries and keys, write keys and values.

``kernels.cpu.attention.paged`` describes the layouts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.common.int4 import GROUP
from kernels.cpu.attention.keys import CACHE_TYPES, IS_INT4, STEP_WORDS, UNBOUNDED, scale_bytes
from kernels.cpu.runtime.kernel import (
    as_float,
    float32_array,
    function,
    int64_array,
    kernel,
    read_arguments,
    split_range,
)
from kernels.cpu.simd.convert_4bit import rotate_group, store_codes, store_float16
from kernels.cpu.simd.convert_8bit import magnitude, store_float8, store_int8
from kernels.cpu.simd.vector import add, divide, largest, load, maximum, multiply, splat, store, total

_INT8 = CACHE_TYPES[torch.int8]


@kernel
def rotary_write(address: Any) -> None:
    """Write a step's keys and values into the cache, and rotate its queries and keys in place.

    Arguments ``(qkv, weight, eps, cos, sin, step, cache, scales, cache_type, tokens, heads, kv_heads, vectors, dim,
    rotated, capacity)``; ``vectors``: queries, keys and values of a token, which may have no values. Queries and keys
    are first normalised by their root mean square unless ``weight`` (``[heads + kv_heads, dim]``) is 0. Their first
    ``rotated`` coordinates are rotated by ``cos`` and ``sin`` (``[tokens, rotated]``, ``rotary_tables``). ``cache`` has
    ``capacity`` slots for each kind and head; those of the tokens are ``slots`` ``[tokens]`` of the ``step``
    of ``attend``. ``scales`` is 0 for a float32 cache. For a cache of 4 bits the groups of all heads are rotated, too
    (``kernels.common.int4``), as queries must be for such keys.
    """
    a, thread, threads = read_arguments(address)
    tokens, heads, kv_heads, vectors, dim, rotated, capacity = a[9], a[10], a[11], a[12], a[13], a[14], a[15]
    num_rotated_heads, half = heads + kv_heads, rotated // 2
    qkv = float32_array(a[0], (tokens, vectors, dim))
    weight = float32_array(a[1], (num_rotated_heads, dim))
    cos, sin = float32_array(a[3], (tokens, rotated)), float32_array(a[4], (tokens, rotated))
    slots = int64_array(int64_array(a[5], STEP_WORDS)[16], tokens)
    first, end = split_range(tokens, thread, threads)
    for token in range(first, end):
        slot = slots[token]
        for head in range(num_rotated_heads):
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
        if a[8] == IS_INT4:
            for i in range(0, vectors * dim, GROUP):
                rotate_group(a[0] + 4 * (token * vectors * dim + i))
        for kv in range(vectors - heads):
            source = a[0] + 4 * dim * (token * vectors + heads + kv)
            _write(source, dim, kv * capacity + slot, a[6], a[7], a[8])


@function
def _write(source: int, dim: int, index: int, cache: int, scales: int, cache_type: int) -> None:
    """Write one key or value to its cache index (``keys``), quantized if the cache is."""
    if cache_type == 0:
        for i in range(0, 4 * dim, 64):
            store(cache + 4 * dim * index + i, load(source + i))
        return
    if cache_type == IS_INT4:
        _write_int4(source, dim, index, cache, scales)
        return
    top = zeros = splat(np.float32(0))
    for i in range(0, 4 * dim, 64):
        part = load(source + i)
        top, zeros = maximum(magnitude(part), top), add(zeros, multiply(part, splat(np.float32(0))))
    limit = np.float32(127) if cache_type == _INT8 else np.float32(448)
    # The sum of zeros is NaN if a number is, which must not become a number.
    scale = max(largest(top), np.float32(1e-20)) / limit + total(zeros)
    float32_array(scales, UNBOUNDED)[index] = scale
    for i in range(0, dim, 16):
        part = divide(load(source + 4 * i), splat(scale))
        if cache_type == _INT8:
            store_int8(cache + dim * index + i, part)
        else:
            store_float8(cache + dim * index + i, part)


@function
def _write_int4(source: int, dim: int, index: int, cache: int, scales: int) -> None:
    """Write a key or value that is rotated by group; see ``kernels.common.int4``."""
    half, first = dim // 2, scales + scale_bytes(dim, IS_INT4) * index
    for group in range(0, dim, GROUP):
        left, right = load(source + 4 * group), load(source + 4 * group + 64)
        zeros = multiply(add(left, right), splat(np.float32(0)))
        top = maximum(magnitude(left), magnitude(right))
        # The sum of zeros is NaN if a number is, which must not become a number.
        scale = store_float16(first + group // GROUP * 2, largest(top) * np.float32(0.125) + total(zeros))
        step = splat(max(scale, np.float32(2.0**-24)))
        store(source + 4 * group, divide(left, step))
        store(source + 4 * group + 64, divide(right, step))
    for i in range(0, half, 16):
        store_codes(cache + half * index + i, load(source + 4 * i), load(source + 4 * (half + i)))
