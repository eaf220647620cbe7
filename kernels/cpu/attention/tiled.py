"""Attention from several tokens to keys that all of them see, tile by tile with an online softmax (Dao et al. 2022,
https://arxiv.org/abs/2205.14135): the keys are read once, and products with them are matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.attention.keys import BLOCK, ahead_of, block_of
from kernels.cpu.runtime.kernel import float32_array, function, inlined_function, int64_array, split_range
from kernels.cpu.simd.exp import exp32
from kernels.cpu.simd.products import TALL, block_mixer, score, transpose
from kernels.cpu.simd.softmax import capped, exponentials
from kernels.cpu.simd.vector import add, between, exceeds, largest, load, maximum, multiply, splat, store, total

ROWS = 64
"""Queries in a tile, one for each of its tokens' heads."""
KEYS = 64
"""Keys of a tile. With their values and the scores they fit into the first-level cache."""
_LEEWAY = np.float32(8)
"""How far above what weights are relative to a score may be, before that is changed."""
_APART = KEYS + 16
"""Floats between two queries' scores; a power of two would have them share a few places of the cache."""

_mix, _mix_wide = block_mixer(4, 1), block_mixer(4, 4)


def tile_floats(dim: int) -> int:
    """Scratch of ``attend_together``: queries, what is mixed for them, scores, lanes of sums, largest scores; a tile's
    blocks; keys turned, or values."""
    return ROWS * (2 * dim + _APART + 17) + 16 + (32 + KEYS) * dim


@function
def attend_together(head: Any, piece: Any, tokens: Any, states: Any, scale: Any, softcap: Any) -> None:
    """Attends from some tokens to all keys of a piece: row, first key, end."""
    dim, per_kv, row, first, end = head.dim, head.per_kv, piece[0], piece[1], piece[2]
    wide, count = 4 * dim, len(tokens) * per_kv
    queries, mixed = head.scratch, head.scratch + ROWS * wide
    scores = mixed + ROWS * wide
    sums = scores + 4 * ROWS * _APART
    tops, rest = float32_array(sums + 64 * ROWS, ROWS), sums + 68 * ROWS
    # At least two parts, each of which asks for half of the values.
    parts = max(min(2, count), (count + TALL - 1) // TALL)
    for part in range(parts):
        low, high = split_range(count, part, parts)
        turned = float32_array(queries + low * wide, (dim, high - low))
        for query in range(low, high):
            source = float32_array(head.qkv + tokens[query // per_kv] * head.tokens_apart + query % per_kv * wide, dim)
            for i in range(dim):
                turned[i, query - low] = source[i] * scale
    for query in range(count):
        tops[query] = -np.inf
        store(sums + 64 * query, splat(np.float32(0)))
    # Up to three queries more, which get nothing of each value: four are mixed at a time.
    padded = (count + 3) // 4 * 4
    for query in range(count, padded):
        for i in range(0, KEYS, 16):
            store(scores + 4 * (query * _APART + i), splat(np.float32(0)))
    for i in range(0, padded * wide, 64):
        store(mixed + i, splat(np.float32(0)))
    for begun in range(first, end, KEYS):
        size = min(KEYS, end - begun)
        _score_tile(head, row, (begun, size, end), queries, (count, parts), scores, rest)
        for query in range(count):
            place, mine = scores + 4 * query * _APART, sums + 64 * query
            tops[query] = _online(place, size, tops[query], mine, mixed + query * wide, dim, softcap)
        _mix_tile(head, row, (begun, size, end), scores, mixed, padded, rest)
    for query in range(count):
        token, own = tokens[query // per_kv], query % per_kv
        state = tops[query], total(load(sums + 64 * query))
        _merge(head.out + wide * (token * head.heads + own), mixed + query * wide, dim, state, states[token, own])


@inlined_function
def _score_tile(head: Any, row: int, keys: Any, queries: int, shape: Any, scores: int, rest: int) -> None:
    """The products of queries, which lie turned in several parts, with a tile's keys. Asks for the tile's values, or
    for the next keys where the queries are so few that mixing is too short to ask for them."""
    dim, (begun, size, end), (count, parts) = head.dim, keys, shape
    wide, turned, held = 4 * dim, rest, rest + 128 * dim
    for block in range(0, size, 2 * BLOCK):
        for half in range(2):
            # Where no keys are left any will do: their scores are hidden.
            position = begun + (block + BLOCK * half if block + BLOCK * half < size else block)
            place = block_of(head, head.keys, row, position, end, held)
            for i in range(0, dim, 16):
                transpose(place + 4 * i, wide, turned + 128 * i + 64 * half, 128)
        for part in range(parts):
            low, high = split_range(count, part, parts)
            out = scores + 4 * (low * _APART + block)
            following, offset = queries, block + BLOCK * part
            if part < 2 and count > 4:
                following = ahead_of(head, head.values, row, begun + offset, end)
            elif part < 2:
                following = ahead_of(head, head.keys, row, begun + offset + 2 * BLOCK, end)
            score(high - low, queries + low * wide, turned, dim, out, 4 * _APART, following)


@inlined_function
def _mix_tile(head: Any, row: int, keys: Any, scores: int, mixed: int, rows: int, rest: int) -> None:
    """Adds to each row a tile's values times their weights. Asks for the next tile's keys."""
    dim, (begun, size, end) = head.dim, keys
    wide, most, held = 4 * dim, dim // 64 * 64, rest + 64
    blocks = int64_array(rest, KEYS // BLOCK)
    for block in range(0, size, BLOCK):
        blocks[block // BLOCK] = block_of(head, head.values, row, begun + block, end, held + block * wide)
    for low in range(0, rows, 4):
        out, weights, following = mixed + low * wide, scores + 4 * low * _APART, mixed
        if 4 * low < KEYS:
            following = ahead_of(head, head.keys, row, begun + KEYS + 4 * low, end)
        for i in range(0, most, 64):
            _mix_wide(out + 4 * i, weights, 4 * _APART, rest, 4 * i, wide, size, following + i * size)
        for i in range(most, dim, 16):
            _mix(out + 4 * i, weights, 4 * _APART, rest, 4 * i, wide, size, mixed)


@inlined_function
def _online(scores: int, size: int, before: Any, sums: int, mixed: int, dim: int, softcap: Any) -> Any:
    """Makes scores weights relative to ``before``, and adds them to the lanes of ``sums``. Where one is too large, what
    all is relative to becomes the largest score so far, for what was mixed before too. Returns it."""
    if softcap > 0:
        for i in range(0, size, 16):
            store(scores + 4 * i, capped(load(scores + 4 * i), softcap))
    if size % 16:
        last = size // 16 * 16
        store(scores + 4 * last, between(load(scores + 4 * last), 0, size - last))
    most, top = before, load(scores)
    for i in range(16, size, 16):
        top = maximum(top, load(scores + 4 * i))
    if exceeds(top, splat(before + _LEEWAY)):
        most = largest(top)
        kept = splat(exp32(before - most))
        store(sums, multiply(load(sums), kept))
        for i in range(0, dim, 16):
            store(mixed + 4 * i, multiply(load(mixed + 4 * i), kept))
    store(sums, add(load(sums), exponentials(scores, size, most)))
    return most


@function
def _merge(out: int, mixed: int, dim: int, made: Any, state: Any) -> None:
    """Adds a tile's result to what was attended to before, which ``state`` tells of."""
    (before, weights), (here, sums) = (state[0], state[1]), made
    most = max(before, here)
    kept, new = exp32(before - most), exp32(here - most)
    for i in range(0, dim, 16):
        part = multiply(load(mixed + 4 * i), splat(new))
        # What is there of nothing may be anything.
        store(out + 4 * i, add(part, multiply(load(out + 4 * i), splat(kept))) if weights > 0 else part)
    state[0] = most
    state[1] = kept * weights + new * sums
