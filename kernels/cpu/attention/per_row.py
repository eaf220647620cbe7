"""Attention from tokens to the keys that each of them reads for itself.

So little is computed with each key that the time is that of reading memory, which depends on the order of the reads:
the first blocks of branches that grow side by side are neighbours in memory, then their second blocks. So several
tokens go through their keys together, block by block, and then through their values. Consecutive pages are read twice
as fast as others.

Scratch of a thread, for a group of ``tokens``::

    ┌─ head.scratch
    │ block    float32 [BLOCK, dim]                    keys or values that cannot be read in place
    ├─ scores
    │ scores   float32 [tokens, heads_per_kv, padded]  of a token's keys from the start of its first block on;
    │                                                  they become weights
    ├─ block_list
    │ blocks   int64 [blocks, 3]                       token, first position, cache index of the first key
    └─
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.attention.keys import BLOCK, key_bytes, load_block, prefetch_block, reads_in_place
from kernels.cpu.runtime.kernel import float32_array, function, int64_array
from kernels.cpu.simd.exp import exp32
from kernels.cpu.simd.products import MAX_MIXED_ROWS, dotter, mixer
from kernels.cpu.simd.softmax import cap, exponentials
from kernels.cpu.simd.vector import between, largest, load, maximum, multiply, splat, store, total

_PREFETCH_BYTES = 8 << 10
"""Distance between the block that is read and the one that is prefetched."""
_MAX_SCORES = 1 << 16
"""Scores of the tokens of a group; they must stay in the second-level cache."""
_MAX_TOKENS = 32
"""Tokens of a group."""

_dots, _dots_half = dotter(BLOCK), dotter(BLOCK // 2)
_mix_line, _mix_wide = mixer(1), mixer(4)


class OwnKeys(NamedTuple):
    """The keys that tokens read for themselves, an entry for each token; see ``paged.attend``."""

    rows: Any
    first: Any
    end: Any
    tree_begin: Any
    tree_offset: Any
    tree: Any


class _Scratch(NamedTuple):
    """Addresses within the scratch, see the picture above."""

    block: int
    scores: int
    block_list: int
    score_stride: int
    """Bytes between the scores of two query heads."""


def _padded(longest: int) -> int:
    """Return the number of scores for ``longest`` keys: whole blocks, and one more for keys before the first in its
    block.
    """
    return (longest + 47) // BLOCK * BLOCK


def _group_size(heads_per_kv: int, padded: int) -> int:
    """Return the number of tokens of a group if each query head has room for ``padded`` scores."""
    return max(1, min(_MAX_TOKENS, _MAX_SCORES // (heads_per_kv * padded)))


def scratch_size(dim: int, heads_per_kv: int, longest: int) -> int:
    """Return the floats of scratch if no token has more than ``longest`` keys.

    Fewer keys need no more, although more tokens form a group then.
    """
    per_token = heads_per_kv * _padded(longest)
    scores = min(_MAX_TOKENS * per_token, max(_MAX_SCORES, per_token))
    return BLOCK * dim + scores + 6 * -(-scores // (BLOCK * heads_per_kv))


_compiled_padded, _compiled_group_size = function(_padded), function(_group_size)


@function
def per_row_attention(
    head: Any, low: int, end: int, next_head: int, own_keys: Any, longest: int, states: Any, scale: Any, softcap: Any
) -> None:
    """Attend from the tokens ``low`` to before ``end`` to their own keys, and finish their results.

    Combines them with the pieces that ``states`` holds. ``next_head``: distance of cache indices to the head that this
    thread reads next, whose first keys are prefetched.
    """
    padded = _compiled_padded(longest)
    step = _compiled_group_size(head.heads_per_kv, padded)
    for first in range(low, end, step):
        _attend(head, first, min(first + step, end), next_head, own_keys, padded, states, scale, softcap)


@function
def _attend(
    head: Any, low: int, end: int, next_head: int, own_keys: Any, padded: int, states: Any, scale: Any, softcap: Any
) -> None:
    """Attend from a group of tokens: scores of all keys, softmax, weighted sum of all values."""
    score_stride, scores = 4 * padded, head.scratch + 4 * BLOCK * head.dim
    block_list = scores + (end - low) * head.heads_per_kv * score_stride
    scratch = _Scratch(head.scratch, scores, block_list, score_stride)
    num_blocks = _list_blocks(head, low, end, own_keys, block_list)
    blocks = int64_array(block_list, (num_blocks, 3))
    _score_keys(head, low, blocks, own_keys, scratch, scale, softcap)
    for token in range(low, end):
        first_block, end_block = own_keys.first[token] // BLOCK, (own_keys.end[token] + BLOCK - 1) // BLOCK
        for query_head in range(head.heads_per_kv):
            row = _score_row(head, scratch, token - low, query_head)
            if own_keys.tree_offset[token] >= 0:
                _mask_tree(row, token, own_keys)
            out = _result(head, token, query_head)
            _softmax(row, (end_block - first_block) * BLOCK, out, head.dim, states[token, query_head])
    _mix_values(head, low, blocks, own_keys, scratch, next_head)
    for token in range(low, end):
        for query_head in range(head.heads_per_kv):
            factor, out = splat(np.float32(1) / states[token, query_head, 1]), _result(head, token, query_head)
            for i in range(0, head.dim, 16):
                store(out + 4 * i, multiply(load(out + 4 * i), factor))


@function
def _score_row(head: Any, scratch: Any, index: int, query_head: int) -> int:
    """Return the address of the scores of a query of the group's token ``index``."""
    return scratch.scores + (index * head.heads_per_kv + query_head) * scratch.score_stride


@function
def _result(head: Any, token: int, query_head: int) -> int:
    """Return the address of a query's result."""
    return head.out + 4 * head.dim * (token * head.num_heads + query_head)


@function
def _list_blocks(head: Any, low: int, end: int, own_keys: Any, block_list: int) -> int:
    """Write token, first position and cache index of each block in the order of reading; return their number."""
    max_blocks, count = 0, 0
    for token in range(low, end):
        max_blocks = max(max_blocks, (own_keys.end[token] + BLOCK - 1) // BLOCK - own_keys.first[token] // BLOCK)
    blocks = int64_array(block_list, ((end - low) * max_blocks, 3))
    for offset in range(max_blocks):
        for token in range(low, end):
            block = own_keys.first[token] // BLOCK + offset
            if BLOCK * block < own_keys.end[token]:
                blocks[count, 0], blocks[count, 1], blocks[count, 2] = token, BLOCK * block, 0
                if head.page_size == BLOCK:
                    pages = int64_array(head.pages + 8 * own_keys.rows[token] * head.columns, head.columns)
                    blocks[count, 2] = head.keys + pages[block] * BLOCK
                count += 1
    return count


@function
def _score_keys(head: Any, low: int, blocks: Any, own_keys: Any, scratch: Any, scale: Any, softcap: Any) -> None:
    """Write the scores of all keys; prefetch those that follow, and after the last keys the first values."""
    dim, heads_per_kv, key_stride, count = head.dim, head.heads_per_kv, 4 * head.dim, len(blocks)
    in_place, to_values = reads_in_place(head), head.values - head.keys
    lead = max(_PREFETCH_BYTES // (BLOCK * key_bytes(head)), 1)
    for index in range(count):
        token, position = blocks[index, 0], blocks[index, 1]
        ahead = blocks[min(index + lead, count - 1), 2]
        if index + lead >= count:
            ahead = blocks[min(index + lead - count, count - 1), 2] + to_values
        keys, following = head.cache + key_stride * blocks[index, 2], head.cache + key_stride * ahead
        if not in_place:
            keys = following = _gather(head, head.keys, own_keys, token, position, ahead, scratch.block)
        first, end = own_keys.first[token], own_keys.end[token]
        row = _score_row(head, scratch, token - low, 0) + 4 * (position - first // BLOCK * BLOCK)
        query = head.qkv + token * head.token_stride
        for query_head in range(heads_per_kv):
            if heads_per_kv == 1:
                products = _dots(query, keys, key_stride, dim // 16, following)
            else:
                # The first two queries prefetch a half of the block each.
                to_prefetch = following + query_head * 8 * key_stride if query_head < 2 else keys
                products = _dots_half(query + query_head * key_stride, keys, key_stride, dim // 16, to_prefetch)
            products = multiply(products, splat(scale))
            if softcap > 0:
                products = cap(products, softcap)
            store(row + query_head * scratch.score_stride, between(products, first - position, end - position))


@function
def _mix_values(head: Any, low: int, blocks: Any, own_keys: Any, scratch: Any, next_head: int) -> None:
    """Add all values times their weights; prefetch those that follow, and after the last the next head's keys."""
    dim, value_stride, count = head.dim, 4 * head.dim, len(blocks)
    in_place, to_values = reads_in_place(head), head.values - head.keys
    lead = max(_PREFETCH_BYTES // (BLOCK * key_bytes(head)), 1)
    for index in range(count):
        token, position = blocks[index, 0], blocks[index, 1]
        ahead = blocks[min(index + lead, count - 1), 2] + to_values
        if index + lead >= count:
            ahead = blocks[min(index + lead - count, count - 1), 2] + next_head
        start = head.cache + value_stride * (blocks[index, 2] + to_values)
        following = head.cache + value_stride * ahead
        if not in_place:
            start = following = _gather(head, head.values, own_keys, token, position, ahead, scratch.block)
        first, end = own_keys.first[token], own_keys.end[token]
        # Values before the first one are skipped, since they may be NaN.
        skipped = max(first - position, 0)
        weights = _score_row(head, scratch, token - low, 0) + 4 * (position - first // BLOCK * BLOCK + skipped)
        values = start + skipped * value_stride, following + skipped * value_stride
        size = min(BLOCK, end - position) - skipped
        _mix(_result(head, token, 0), weights, scratch.score_stride, values, dim, head.heads_per_kv, size)


@function
def _gather(head: Any, start: int, own_keys: Any, token: int, position: int, ahead: int, buffer: int) -> int:
    """Return the address of a block that is not read in place; prefetch the one at the cache index ``ahead``."""
    if head.page_size == BLOCK:
        prefetch_block(head, ahead)
    return load_block(head, start, own_keys.rows[token], position, own_keys.end[token], buffer)


@function
def _mask_tree(scores: int, token: int, own_keys: Any) -> None:
    """Hide the keys of a token's tree whose byte is 0."""
    first, end, tree_begin = own_keys.first[token], own_keys.end[token], own_keys.tree_begin[token]
    start = first // BLOCK * BLOCK
    row = float32_array(scores, end - start)
    for position in range(max(first, tree_begin), end):
        if not own_keys.tree[own_keys.tree_offset[token] + position - tree_begin]:
            row[position - start] = -np.inf


@function
def _softmax(scores: int, size: int, out: int, dim: int, state: Any) -> None:
    """Turn scores into weights relative to the largest of them and of the pieces before, and rescale ``out`` to it."""
    previous_top, previous_sum = state[0], state[1]
    lanes = splat(previous_top)
    for i in range(0, size, 16):
        lanes = maximum(lanes, load(scores + 4 * i))
    top = largest(lanes)
    weights_sum = total(exponentials(scores, size, top))
    factor = exp32(previous_top - top)
    for i in range(0, dim, 16):
        # If there was no piece before, ``out`` is uninitialised.
        store(out + 4 * i, multiply(load(out + 4 * i), splat(factor)) if previous_sum > 0 else splat(np.float32(0)))
    state[0], state[1] = top, factor * previous_sum + weights_sum


@function
def _mix(out: int, weights: int, weight_stride: int, values: Any, dim: int, rows: int, count: int) -> None:
    """Add ``count`` values to each of ``rows`` rows, times the row's own weights.

    ``values``: the address of the values and that of memory to prefetch. Strides are in bytes.
    """
    stride, wide_end, row, (start, ahead) = 4 * dim, dim // 64 * 64, 0, values
    while row < rows:
        num_rows = min(rows - row, MAX_MIXED_ROWS)
        target, row_weights = out + row * stride, weights + row * weight_stride
        for i in range(0, wide_end, 64):
            _mix_wide(num_rows, target + 4 * i, row_weights, weight_stride, start + 4 * i, stride, count, ahead + 4 * i)
        for i in range(wide_end, dim, 16):
            _mix_line(num_rows, target + 4 * i, row_weights, weight_stride, start + 4 * i, stride, count, ahead + 4 * i)
        row, ahead = row + num_rows, start
