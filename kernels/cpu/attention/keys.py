"""Where the keys and values are that ``kernels.cpu.attention.paged`` reads, and reading them sixteen at a time.

Keys and values of a layer are counted through all heads, keys before values: a *place* is such a number. Pages hold
sixteen tokens or no multiple of sixteen. In the former case a block of sixteen tokens lies together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.cpu.runtime.kernel import float32_array, function, int64_array
from kernels.cpu.simd.convert_8bit import load_float8, load_int8
from kernels.cpu.simd.vector import load, multiply, prefetch, splat, store

STEP_WORDS = 17
"""Words that tell ``attend`` of a step."""
KINDS = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}
"""What a cache may be of, as the kernels are told it."""
SOME = 1 << 40
"""A length for arrays that are as long as their indices reach."""
BLOCK = 16
"""Tokens whose keys or values are read at once."""
_INT8 = KINDS[torch.int8]


class Head(NamedTuple):
    """One key-value head of a layer, and how its queries attend. Addresses and counts."""

    qkv: int
    """Its first query of the first token."""
    out: int
    """The same query's result."""
    keys: int
    """The place of its first key."""
    values: int
    cache: int
    scales: int
    kind: int
    """One of ``KINDS``."""
    pages: int
    tokens_apart: int
    """Bytes between two tokens' queries."""
    heads: int
    per_kv: int
    dim: int
    page_size: int
    columns: int
    scratch: int


@function
def bytes_of(head: Any) -> int:
    """The bytes of a key."""
    return head.dim if head.kind else 4 * head.dim


@function
def reads_in_place(head: Any) -> bool:
    """Whether blocks are read where they are."""
    return head.page_size == BLOCK and head.kind == 0


@function
def place_of(head: Any, kind: int, row: int, position: int) -> int:
    """The place of a token's key, or value, where ``kind`` is that of the first one."""
    page = int64_array(head.pages + 8 * row * head.columns, head.columns)[position // head.page_size]
    return kind + page * head.page_size + position % head.page_size


@function
def block_of(head: Any, kind: int, row: int, position: int, end: int, held: int) -> int:
    """The address of sixteen consecutive keys or values as float32: copied to ``held`` where they do not lie so. Those
    from ``end`` on may be any."""
    place = place_of(head, kind, row, position)
    if reads_in_place(head):
        return head.cache + 4 * head.dim * place
    if head.page_size == BLOCK:
        _copy(head, place, BLOCK, held)
    else:
        for key in range(BLOCK):
            _copy(head, place_of(head, kind, row, min(position + key, end - 1)), 1, held + 4 * head.dim * key)
    return held


@function
def ahead_of(head: Any, kind: int, row: int, position: int, end: int) -> int:
    """The address of a block that is read next; anything where there is none in one place."""
    if position >= end or not reads_in_place(head):
        return head.qkv
    return head.cache + 4 * head.dim * place_of(head, kind, row, position)


@function
def ask(head: Any, place: int) -> None:
    """Asks for a block of 8 bits that will be read soon."""
    prefetch(head.scales + 4 * place)
    for i in range(0, BLOCK * head.dim, 64):
        prefetch(head.cache + head.dim * place + i)


@function
def _copy(head: Any, place: int, keys: int, to: int) -> None:
    """Writes consecutive keys or values as float32."""
    dim, codes, scales = head.dim, head.cache + bytes_of(head) * place, float32_array(head.scales + 4 * place, (keys,))
    if head.kind == 0:
        for i in range(0, 4 * dim * keys, 64):
            store(to + i, load(codes + i))
    elif head.kind == _INT8:
        for key in range(keys):
            for i in range(dim * key, dim * (key + 1), 16):
                store(to + 4 * i, multiply(load_int8(codes + i), splat(scales[key])))
    else:
        for key in range(keys):
            for i in range(dim * key, dim * (key + 1), 16):
                store(to + 4 * i, multiply(load_float8(codes + i), splat(scales[key])))
