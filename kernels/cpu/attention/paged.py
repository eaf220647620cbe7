"""Attention over the paged cache in one kernel a layer.

Queries, keys and values of a step's tokens lie together, ``[tokens, heads + 2 kv_heads, dim]``, as their projection
left them. The cache of one layer is ``[2, kv_heads, slots, dim]``, keys before values. Everything is float32 and
contiguous, ``dim`` a multiple of 16. The cache may be int8 or float8 too, with a float32 scale for each token, head and
kind, ``[2, kv_heads, slots]``: sixteen keys or values become float32 where they are read, once for all queries that
meet them there.

A token's keys come in pieces. Those that several tokens see whole are attended to by all of these together
(``attention_tile``). What is left each token reads for itself (``attention_own``). What a token gets depends on how its
keys are cut into pieces, and on nothing else: not on the other tokens of a step, nor on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.attention.keys import SOME, STEP_WORDS, Head
from kernels.cpu.attention.per_row import Spans, attend_alone, own_floats
from kernels.cpu.attention.tiled import ROWS, attend_together, tile_floats
from kernels.cpu.runtime.kernel import (
    as_float,
    float32_array,
    int64_array,
    kernel,
    read_arguments,
    split_range,
    uint8_array,
)


def tile_tokens(heads_per_kv: int) -> int:
    """Tokens of one row that are best attended together to what they all see."""
    return max(1, ROWS // heads_per_kv)


def scratch_floats(dim: int, heads_per_kv: int, longest: int) -> int:
    """What each thread of ``attend`` needs where no token reads more than ``longest`` keys for itself."""
    return max(tile_floats(dim), own_floats(dim, heads_per_kv, longest))


@kernel
def attend(address: Any) -> None:
    """``(qkv, cache, scales, kind, out, step, heads, kv_heads, dim, capacity, page_size, groups, scale, softcap)``, and
    at ``step``
    ``(scratch, pages, rows, first, end, tree_begin, tree_at, tree, pieces, members, states, tokens, columns, count,
    longest, apart, slots)``, so that a tape can be repeated for another step.

    Token ``i`` of ``tokens`` belongs to row ``rows[i]`` of the page table ``pages`` ``[rows, columns]`` and reads the
    keys ``first[i]`` until ``end[i]`` for itself, of which there are 1 to ``longest``. Where ``tree_at[i]`` is not
    negative, of the keys from ``tree_begin[i]`` on only those whose byte in ``tree``, from ``tree_at[i]`` on, is not 0.
    ``page_size``: 16, or no multiple of 16.

    ``pieces`` ``[count, 5]``: row, first key (on the edge of a page), end, and where the piece's tokens stand in
    ``members``, first and end, in rising order. ``out`` ``[tokens, heads, dim]`` gets the result, and ``states``
    ``[tokens, heads, 2]`` what the weights are relative to and their sum. ``softcap``: see ``LayerAttentionConfig``, 0
    for none. ``scratch``: ``[threads, apart]``, see ``scratch_floats``. Threads divide the heads, and ``groups`` ranges
    of the tokens.
    """
    a, thread, threads = read_arguments(address)
    s = int64_array(a[5], STEP_WORDS)
    tokens, heads, kv_heads, dim, count, groups = s[11], a[6], a[7], a[8], s[13], a[11]
    per_kv, longest, capacity = heads // kv_heads, s[14], a[9]
    scale, softcap = np.float32(as_float(a[12])), np.float32(as_float(a[13]))
    rows, firsts, ends = int64_array(s[2], tokens), int64_array(s[3], tokens), int64_array(s[4], tokens)
    spans = Spans(rows, firsts, ends, int64_array(s[5], tokens), int64_array(s[6], tokens), uint8_array(s[7], SOME))
    pieces, members, all_states = (
        int64_array(s[8], (count, 5)),
        int64_array(s[9], SOME),
        float32_array(s[10], (tokens, heads, 2)),
    )
    for part in range(thread, groups * kv_heads, threads):
        index = part % kv_heads
        begins, after = split_range(tokens, part // kv_heads, groups)
        head = Head(
            a[0] + 4 * dim * per_kv * index,
            a[4] + 4 * dim * per_kv * index,
            capacity * index,
            capacity * (kv_heads + index),
            a[1],
            a[2],
            a[3],
            s[1],
            4 * dim * (heads + 2 * kv_heads),
            heads,
            per_kv,
            dim,
            a[10],
            s[12],
            s[0] + 4 * s[15] * thread,
        )
        states = all_states[:, per_kv * index : per_kv * (index + 1)]
        for token in range(begins, after):
            for own in range(per_kv):
                states[token, own, 0], states[token, own, 1] = -np.inf, 0
        for piece in range(count):
            low, high = pieces[piece, 3], pieces[piece, 4]
            while low < high and members[low] < begins:
                low += 1
            while low < high and members[high - 1] >= after:
                high -= 1
            step = max(1, ROWS // per_kv)
            for some in range(low, high, step):
                together = members[some : min(some + step, high)]
                attend_together(head, pieces[piece], together, states, scale, softcap)
        # After this head comes another one.
        shift = capacity * ((part + threads) % kv_heads - index)
        attend_alone(head, begins, after, shift, spans, longest, states, scale, softcap)
