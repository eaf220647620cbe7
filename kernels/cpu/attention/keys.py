"""The layout of keys and values in the paged cache, and reading them sixteen at a time.

A *cache index* counts the keys and values of a layer through all heads, keys before values. Pages hold sixteen tokens,
or a number of tokens that is not a multiple of sixteen. With pages of sixteen a block of sixteen tokens is contiguous.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.common.int4 import GROUP, INT4
from kernels.cpu.runtime.kernel import float32_array, function, int64_array
from kernels.cpu.simd.convert_4bit import load_float16, load_high_codes, load_low_codes
from kernels.cpu.simd.convert_8bit import load_float8, load_int8
from kernels.cpu.simd.vector import load, multiply, prefetch, splat, store

STEP_WORDS = 17
"""Words of a step's arguments of ``attend``."""
CACHE_TYPES = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2, INT4: 3}
"""Types of a cache, by the number that kernels take."""
UNBOUNDED = 1 << 40
"""Length of an array of unknown length, which is never indexed beyond its end."""
BLOCK = 16
"""Tokens whose keys or values are read together."""
IS_INT4 = CACHE_TYPES[INT4]
_INT8 = CACHE_TYPES[torch.int8]


class Head(NamedTuple):
    """One key-value head of a layer, and how its queries attend: addresses and counts."""

    qkv: int
    """Address of its first query of the first token."""
    out: int
    """Address of that query's result."""
    keys: int
    """Cache index of its first key."""
    values: int
    """Cache index of its first value."""
    cache: int
    scales: int
    cache_type: int
    """One of ``CACHE_TYPES``."""
    pages: int
    token_stride: int
    """Bytes between two tokens' queries."""
    num_heads: int
    heads_per_kv: int
    dim: int
    page_size: int
    columns: int
    """Columns of the page table."""
    scratch: int


@function
def key_bytes(head: Any) -> int:
    """Return the size of a key."""
    if head.cache_type == IS_INT4:
        return head.dim // 2
    return head.dim if head.cache_type else 4 * head.dim


@function
def scale_bytes(dim: int, cache_type: int) -> int:
    """Return the size of the scales of a quantized key."""
    return 2 * (dim // GROUP) if cache_type == IS_INT4 else 4


@function
def reads_in_place(head: Any) -> bool:
    """Return True if blocks are read where they lie, and not copied as float32 first."""
    return head.page_size == BLOCK and head.cache_type == 0


@function
def cache_index(head: Any, start: int, row: int, position: int) -> int:
    """Return the cache index of a token's key or value; ``start``: that of the head's first key or value."""
    page = int64_array(head.pages + 8 * row * head.columns, head.columns)[position // head.page_size]
    return start + page * head.page_size + position % head.page_size


@function
def load_block(head: Any, start: int, row: int, position: int, end: int, buffer: int) -> int:
    """Return the address of sixteen consecutive keys or values as float32; those from ``end`` on are undefined.

    They are copied to ``buffer`` unless they are read in place.
    """
    index = cache_index(head, start, row, position)
    if reads_in_place(head):
        return head.cache + 4 * head.dim * index
    if head.page_size == BLOCK:
        _copy(head, index, BLOCK, buffer)
    else:
        for key in range(BLOCK):
            _copy(head, cache_index(head, start, row, min(position + key, end - 1)), 1, buffer + 4 * head.dim * key)
    return buffer


@function
def next_block(head: Any, start: int, row: int, position: int, end: int) -> int:
    """Return the address of a block to prefetch, or that of the queries if there is no such contiguous block."""
    if position >= end or not reads_in_place(head):
        return head.qkv
    return head.cache + 4 * head.dim * cache_index(head, start, row, position)


@function
def prefetch_block(head: Any, index: int) -> None:
    """Prefetch a block of quantized keys or values from a cache index on."""
    size = scale_bytes(head.dim, head.cache_type)
    for i in range(0, BLOCK * size, 64):
        prefetch(head.scales + size * index + i)
    for i in range(0, BLOCK * key_bytes(head), 64):
        prefetch(head.cache + key_bytes(head) * index + i)


@function
def _copy(head: Any, index: int, count: int, to: int) -> None:
    """Write ``count`` consecutive keys or values as float32."""
    if head.cache_type == IS_INT4:
        _copy_int4(head, index, count, to)
        return
    dim, codes, scales = (
        head.dim,
        head.cache + key_bytes(head) * index,
        float32_array(head.scales + 4 * index, (count,)),
    )
    if head.cache_type == 0:
        for i in range(0, 4 * dim * count, 64):
            store(to + i, load(codes + i))
    elif head.cache_type == _INT8:
        for key in range(count):
            for i in range(dim * key, dim * (key + 1), 16):
                store(to + 4 * i, multiply(load_int8(codes + i), splat(scales[key])))
    else:
        for key in range(count):
            for i in range(dim * key, dim * (key + 1), 16):
                store(to + 4 * i, multiply(load_float8(codes + i), splat(scales[key])))


@function
def _copy_int4(head: Any, index: int, count: int, to: int) -> None:
    """Write ``count`` consecutive keys or values as float32, rotated as they are."""
    dim, half, size = head.dim, head.dim // 2, scale_bytes(head.dim, head.cache_type)
    for key in range(count):
        codes, scales, out = head.cache + half * (index + key), head.scales + size * (index + key), to + 4 * dim * key
        for i in range(0, half, 16):
            low, high = load_float16(scales + i // GROUP * 2), load_float16(scales + (half + i) // GROUP * 2)
            store(out + 4 * i, multiply(load_low_codes(codes + i), splat(low)))
            store(out + 4 * (half + i), multiply(load_high_codes(codes + i), splat(high)))
