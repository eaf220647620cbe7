"""Attention from several tokens to keys that all of them see, tile by tile with an online softmax.

The keys are read once for all tokens, and the products with them are matrix products (FlashAttention, Dao et al. 2022,
https://arxiv.org/abs/2205.14135).

Scratch of a thread::

    ┌─ head.scratch
    │ queries   [parts][dim, queries of the part]    scaled and transposed
    ├─ mixed
    │ mixed     [MAX_QUERIES, dim]                   weighted sums of values
    ├─ scores
    │ scores    [MAX_QUERIES, _SCORE_STRIDE]         of a tile; they become weights
    ├─ sums
    │ sums      [MAX_QUERIES, 16]                    sums of weights, by lanes
    │ tops      [MAX_QUERIES]                        the scores that weights are relative to
    ├─ buffers
    │ blocks    int64 [KEYS / BLOCK], then values [KEYS, dim];
    │           or transposed keys [dim, 32], then a block of keys
    └─
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.attention.keys import BLOCK, load_block, next_block
from kernels.cpu.runtime.kernel import float32_array, function, inlined_function, int64_array, split_range
from kernels.cpu.simd.exp import exp32
from kernels.cpu.simd.products import TALL, block_mixer, score, transpose
from kernels.cpu.simd.softmax import cap, exponentials
from kernels.cpu.simd.vector import add, between, exceeds, largest, load, maximum, multiply, splat, store, total

MAX_QUERIES = 64
"""Queries of a tile, one for each head of each of its tokens."""
KEYS = 64
"""Keys of a tile. They, their values and the scores fit the first-level cache."""
_LEEWAY = np.float32(8)
"""Difference by which a score may exceed the one that weights are relative to before that is replaced."""
_SCORE_STRIDE = KEYS + 16
"""Floats between the scores of two queries; a power of two would map them to a few sets of the cache."""

_mix, _mix_wide = block_mixer(4, 1), block_mixer(4, 4)


def scratch_size(dim: int) -> int:
    """Return the floats of scratch."""
    return MAX_QUERIES * (2 * dim + _SCORE_STRIDE + 17) + 16 + (32 + KEYS) * dim


@function
def shared_prefix_attention(head: Any, piece: Any, tokens: Any, states: Any, scale: Any, softcap: Any) -> None:
    """Attend from some tokens to all keys of a piece: ``(row, first key, end, …)``."""
    dim, heads_per_kv, row, first, end = head.dim, head.heads_per_kv, piece[0], piece[1], piece[2]
    stride, count = 4 * dim, len(tokens) * heads_per_kv
    queries, mixed = head.scratch, head.scratch + MAX_QUERIES * stride
    scores = mixed + MAX_QUERIES * stride
    sums = scores + 4 * MAX_QUERIES * _SCORE_STRIDE
    tops, buffers = float32_array(sums + 64 * MAX_QUERIES, MAX_QUERIES), sums + 68 * MAX_QUERIES
    # At least two parts, each of which prefetches half of the values.
    parts = max(min(2, count), (count + TALL - 1) // TALL)
    for part in range(parts):
        low, high = split_range(count, part, parts)
        transposed = float32_array(queries + low * stride, (dim, high - low))
        for query in range(low, high):
            token, query_head = tokens[query // heads_per_kv], query % heads_per_kv
            source = float32_array(head.qkv + token * head.token_stride + query_head * stride, dim)
            for i in range(dim):
                transposed[i, query - low] = source[i] * scale
    for query in range(count):
        tops[query] = -np.inf
        store(sums + 64 * query, splat(np.float32(0)))
    # Values are mixed for four queries at a time: up to three more queries get weights of zero.
    padded = (count + 3) // 4 * 4
    for query in range(count, padded):
        for i in range(0, KEYS, 16):
            store(scores + 4 * (query * _SCORE_STRIDE + i), splat(np.float32(0)))
    for i in range(0, padded * stride, 64):
        store(mixed + i, splat(np.float32(0)))
    for start in range(first, end, KEYS):
        size = min(KEYS, end - start)
        _score_tile(head, row, (start, size, end), queries, (count, parts), scores, buffers)
        for query in range(count):
            query_scores, query_sums = scores + 4 * query * _SCORE_STRIDE, sums + 64 * query
            query_mixed = mixed + query * stride
            tops[query] = _online_softmax(query_scores, size, tops[query], query_sums, query_mixed, dim, softcap)
        _mix_tile(head, row, (start, size, end), scores, mixed, padded, buffers)
    for query in range(count):
        token, query_head = tokens[query // heads_per_kv], query % heads_per_kv
        out = head.out + stride * (token * head.num_heads + query_head)
        state = tops[query], total(load(sums + 64 * query))
        _merge(out, mixed + query * stride, dim, state, states[token, query_head])


@inlined_function
def _score_tile(head: Any, row: int, keys: Any, queries: int, shape: Any, scores: int, buffers: int) -> None:
    """Write the products of the queries with a tile's keys.

    Prefetches the tile's values, or the next keys if there are so few queries that mixing is too short to do that.
    """
    dim, (start, size, end), (count, parts) = head.dim, keys, shape
    stride, transposed, buffer = 4 * dim, buffers, buffers + 128 * dim
    for block in range(0, size, 2 * BLOCK):
        for half in range(2):
            # If no keys are left, any others will do: their scores are hidden.
            position = start + (block + BLOCK * half if block + BLOCK * half < size else block)
            source = load_block(head, head.keys, row, position, end, buffer)
            for i in range(0, dim, 16):
                transpose(source + 4 * i, stride, transposed + 128 * i + 64 * half, 128)
        for part in range(parts):
            low, high = split_range(count, part, parts)
            out = scores + 4 * (low * _SCORE_STRIDE + block)
            following, offset = queries, block + BLOCK * part
            if part < 2 and count > 4:
                following = next_block(head, head.values, row, start + offset, end)
            elif part < 2:
                following = next_block(head, head.keys, row, start + offset + 2 * BLOCK, end)
            score(high - low, queries + low * stride, transposed, dim, out, 4 * _SCORE_STRIDE, following)


@inlined_function
def _mix_tile(head: Any, row: int, keys: Any, scores: int, mixed: int, rows: int, buffers: int) -> None:
    """Add a tile's values times their weights to each row. Prefetches the next tile's keys."""
    dim, (start, size, end) = head.dim, keys
    stride, wide_end, buffer = 4 * dim, dim // 64 * 64, buffers + 64
    blocks = int64_array(buffers, KEYS // BLOCK)
    for block in range(0, size, BLOCK):
        blocks[block // BLOCK] = load_block(head, head.values, row, start + block, end, buffer + block * stride)
    for low in range(0, rows, 4):
        out, weights, following = mixed + low * stride, scores + 4 * low * _SCORE_STRIDE, mixed
        if 4 * low < KEYS:
            following = next_block(head, head.keys, row, start + KEYS + 4 * low, end)
        for i in range(0, wide_end, 64):
            _mix_wide(out + 4 * i, weights, 4 * _SCORE_STRIDE, buffers, 4 * i, stride, size, following + i * size)
        for i in range(wide_end, dim, 16):
            _mix(out + 4 * i, weights, 4 * _SCORE_STRIDE, buffers, 4 * i, stride, size, mixed)


@inlined_function
def _online_softmax(scores: int, size: int, previous_top: Any, sums: int, mixed: int, dim: int, softcap: Any) -> Any:
    """Turn scores into weights relative to ``previous_top`` and add them to the lanes of ``sums``; return the top.

    If a score is too large, weights become relative to the largest score so far, and so do ``sums`` and ``mixed``.
    """
    if softcap > 0:
        for i in range(0, size, 16):
            store(scores + 4 * i, cap(load(scores + 4 * i), softcap))
    if size % 16:
        last = size // 16 * 16
        store(scores + 4 * last, between(load(scores + 4 * last), 0, size - last))
    top, lanes = previous_top, load(scores)
    for i in range(16, size, 16):
        lanes = maximum(lanes, load(scores + 4 * i))
    if exceeds(lanes, splat(previous_top + _LEEWAY)):
        top = largest(lanes)
        factor = splat(exp32(previous_top - top))
        store(sums, multiply(load(sums), factor))
        for i in range(0, dim, 16):
            store(mixed + 4 * i, multiply(load(mixed + 4 * i), factor))
    store(sums, add(load(sums), exponentials(scores, size, top)))
    return top


@function
def _merge(out: int, mixed: int, dim: int, made: Any, state: Any) -> None:
    """Add a piece's result to that of the pieces before, by their log-sum-exps; ``state``: top and sum of weights."""
    (previous_top, previous_sum), (new_top, new_sum) = (state[0], state[1]), made
    top = max(previous_top, new_top)
    previous_factor, new_factor = exp32(previous_top - top), exp32(new_top - top)
    for i in range(0, dim, 16):
        part = multiply(load(mixed + 4 * i), splat(new_factor))
        # If there was no piece before, ``out`` is uninitialised.
        store(out + 4 * i, add(part, multiply(load(out + 4 * i), splat(previous_factor))) if previous_sum > 0 else part)
    state[0] = top
    state[1] = previous_factor * previous_sum + new_factor * new_sum
