"""Attention over the paged cache, one kernel a layer.

Queries, keys and values of a step's tokens lie together, ``[tokens, heads + 2 kv_heads, dim]``, as their projection
wrote them. The cache of one layer is ``[2, kv_heads, slots, dim]``, keys before values. With one vector that is key and
value they are ``[tokens, heads + 1, dim]`` and ``[1, 1, slots, dim]``. All of it is float32 and
contiguous, and ``dim`` a multiple of 16. The cache may also be int8 or float8, with a float32 scale for each token,
head and kind, ``[2, kv_heads, slots]``: sixteen keys or values become float32 when they are read, once for all queries
that read them then. A cache of 4 bits (``kernels.common.int4``) has ``[2, kv_heads, slots, dim / 2]`` bytes and
float16 scales ``[2, kv_heads, slots, dim / 32]``. Its keys and values are rotated by group; so are the queries, by
``rotary_write``, and the results are rotated back.

The keys of a token come in pieces. A piece that several tokens see whole is attended to by all of them together
(``tiled``); the rest each token reads for itself (``per_row``). What a token gets depends on how its keys are cut into
pieces, and on nothing else: not on the other tokens of the step, nor on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.common.int4 import GROUP
from kernels.cpu.attention import per_row, tiled
from kernels.cpu.attention.keys import IS_INT4, STEP_WORDS, UNBOUNDED, Head
from kernels.cpu.attention.per_row import OwnKeys, per_row_attention
from kernels.cpu.attention.tiled import MAX_QUERIES, shared_prefix_attention
from kernels.cpu.runtime.kernel import (
    as_float,
    float32_array,
    int64_array,
    kernel,
    read_arguments,
    split_range,
    uint8_array,
)
from kernels.cpu.simd.convert_4bit import rotate_group


def max_tile_tokens(heads_per_kv: int) -> int:
    """Return how many tokens of one row fit a tile."""
    return max(1, MAX_QUERIES // heads_per_kv)


def scratch_size(dim: int, heads_per_kv: int, longest: int) -> int:
    """Return the floats of scratch for each thread; ``longest``: the most keys that a token reads for itself."""
    return max(tiled.scratch_size(dim), per_row.scratch_size(dim, heads_per_kv, longest))


@kernel
def attend(address: Any) -> None:
    """Attention of a step's tokens in one layer. One piece, because it only unpacks many arguments.

    Arguments ``(qkv, cache, scales, cache_type, out, step, heads, kv_heads, vectors, dim, to_next_head, to_values,
    page_size, groups, scale, softcap)``, and at ``step`` ``(scratch, pages, rows, first, end, tree_begin, tree_offset,
    tree, pieces, members, states, tokens, columns, num_pieces, longest, scratch_stride, slots)``, so that a recorded
    kernel graph can be replayed for another step. ``vectors``: those of a token in ``qkv``. ``to_next_head`` and
    ``to_values``: distances of cache indices between the keys of two heads, and from a head's keys to its values. Both
    are 0 if all heads read one key that is its value, too: ``kv_heads`` are groups of query heads then.

    Token ``i`` of ``tokens`` belongs to row ``rows[i]`` of the page table ``pages`` ``[rows, columns]`` and reads the
    keys from ``first[i]`` to before ``end[i]`` for itself, 1 to ``longest`` of them. If ``tree_offset[i]`` is not
    negative, then of the keys from ``tree_begin[i]`` on it sees only those whose byte in ``tree``, from
    ``tree_offset[i]`` on, is not 0. ``page_size``: 16, or not a multiple of 16.

    ``pieces`` ``[num_pieces, 5]``: row, first key (at the start of a page), end, and the range of the piece's tokens in
    ``members``, which are ascending. ``out`` ``[tokens, heads, dim]`` gets the result, and ``states`` ``[tokens, heads,
    2]`` the largest score, which weights are relative to, and the sum of weights. ``softcap``: 0 for none. ``scratch``:
    ``[threads, scratch_stride]``, see ``scratch_size``. Threads divide the heads, and ``groups`` ranges of the tokens.
    """
    a, thread, threads = read_arguments(address)
    s = int64_array(a[5], STEP_WORDS)
    tokens, heads, kv_heads, dim, num_pieces, groups = s[11], a[6], a[7], a[9], s[13], a[13]
    heads_per_kv, longest, to_next_head = heads // kv_heads, s[14], a[10]
    scale, softcap = np.float32(as_float(a[14])), np.float32(as_float(a[15]))
    own_keys = OwnKeys(
        int64_array(s[2], tokens),
        int64_array(s[3], tokens),
        int64_array(s[4], tokens),
        int64_array(s[5], tokens),
        int64_array(s[6], tokens),
        uint8_array(s[7], UNBOUNDED),
    )
    pieces, members = int64_array(s[8], (num_pieces, 5)), int64_array(s[9], UNBOUNDED)
    all_states = float32_array(s[10], (tokens, heads, 2))
    for part in range(thread, groups * kv_heads, threads):
        kv_head = part % kv_heads
        first, end = split_range(tokens, part // kv_heads, groups)
        head = Head(
            a[0] + 4 * dim * heads_per_kv * kv_head,
            a[4] + 4 * dim * heads_per_kv * kv_head,
            to_next_head * kv_head,
            to_next_head * kv_head + a[11],
            a[1],
            a[2],
            a[3],
            s[1],
            4 * dim * a[8],
            heads,
            heads_per_kv,
            dim,
            a[12],
            s[12],
            s[0] + 4 * s[15] * thread,
        )
        states = all_states[:, heads_per_kv * kv_head : heads_per_kv * (kv_head + 1)]
        for token in range(first, end):
            for query_head in range(heads_per_kv):
                states[token, query_head, 0], states[token, query_head, 1] = -np.inf, 0
        for piece in range(num_pieces):
            low, high = pieces[piece, 3], pieces[piece, 4]
            while low < high and members[low] < first:
                low += 1
            while low < high and members[high - 1] >= end:
                high -= 1
            step = max(1, MAX_QUERIES // heads_per_kv)
            for start in range(low, high, step):
                tile_tokens = members[start : min(start + step, high)]
                shared_prefix_attention(head, pieces[piece], tile_tokens, states, scale, softcap)
        # The next part of this thread is another head.
        next_head = to_next_head * ((part + threads) % kv_heads - kv_head)
        per_row_attention(head, first, end, next_head, own_keys, longest, states, scale, softcap)
        if a[3] == IS_INT4:
            for token in range(first, end):
                for i in range(0, heads_per_kv * dim, GROUP):
                    rotate_group(head.out + 4 * (dim * token * heads + i))
