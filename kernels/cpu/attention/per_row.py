"""Attention from tokens to keys that each of them reads for itself.

Next to nothing is computed with such a key, so it takes the time that its memory takes, and that depends on the order
in which it is read: of branches that grow side by side the first blocks lie side by side, then the second ones. So
several tokens go through their keys together, block by block, and then through their values. Consecutive pages come
twice as fast as others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.attention.keys import BLOCK, ask, block_of, bytes_of, reads_in_place
from kernels.cpu.runtime.kernel import float32_array, function, int64_array
from kernels.cpu.simd.exp import exp32
from kernels.cpu.simd.products import dotter, mixer
from kernels.cpu.simd.softmax import capped, exponentials
from kernels.cpu.simd.vector import between, largest, load, maximum, multiply, splat, store, total

_LEAD = 8 << 10
"""Bytes between the block that is read and the one that is asked for."""
_ROOM = 1 << 16
"""Scores of the tokens that go together; they must stay in the cache of the second level."""
_MOST = 32
"""Such tokens."""

_dots, _dots_half = dotter(BLOCK), dotter(BLOCK // 2)
_mix4, _mix2, _mix1 = (mixer(rows, 1) for rows in (4, 2, 1))
_mix4_wide, _mix2_wide, _mix1_wide = (mixer(rows, 4) for rows in (4, 2, 1))


class Spans(NamedTuple):
    """Which keys tokens read for themselves, see ``attend``."""

    rows: Any
    firsts: Any
    ends: Any
    tree_begins: Any
    tree_ats: Any
    tree: Any


def _padded(longest: int) -> int:
    """Room for the scores of ``longest`` keys."""
    return (longest + 47) // BLOCK * BLOCK


def _company(heads_per_kv: int, padded: int) -> int:
    """How many tokens go together, with so much room for the scores of each head."""
    return max(1, min(_MOST, _ROOM // (heads_per_kv * padded)))


def own_floats(dim: int, heads_per_kv: int, longest: int) -> int:
    """Scratch of ``attend_alone`` where no token has more than ``longest`` keys: a block, scores, and the list of
    blocks. Shorter tokens need no more, although more of them go together."""
    each = heads_per_kv * _padded(longest)
    scores = min(_MOST * each, max(_ROOM, each))
    return BLOCK * dim + scores + 6 * -(-scores // (BLOCK * heads_per_kv))


_padded_to, _company_of = function(_padded), function(_company)


@function
def attend_alone(
    head: Any, low: int, end: int, shift: int, spans: Spans, longest: int, states: Any, scale: Any, softcap: Any
) -> None:
    """Attends from the tokens ``low`` until ``end`` to their own keys and to what they were attended to before, and
    ends their results. What is read next lies ``shift`` places further than what is read first."""
    padded = _padded_to(longest)
    some = _company_of(head.per_kv, padded)
    for first in range(low, end, some):
        _attend(head, first, min(first + some, end), shift, spans, padded, states, scale, softcap)


@function
def _attend(
    head: Any, low: int, end: int, shift: int, spans: Spans, padded: int, states: Any, scale: Any, softcap: Any
) -> None:
    dim, per_kv, wide = head.dim, head.per_kv, 4 * head.dim
    held, scores, apart = head.scratch, head.scratch + BLOCK * wide, 4 * padded
    listed = scores + (end - low) * per_kv * apart
    count, in_place = _list(head, low, end, spans, listed), reads_in_place(head)
    blocks = int64_array(listed, (count, 3))
    lead, between_kinds = max(_LEAD // (BLOCK * bytes_of(head)), 1), head.values - head.keys
    for index in range(count):
        token, position = blocks[index, 0], blocks[index, 1]
        ahead = blocks[min(index + lead, count - 1), 2]
        if index + lead >= count:
            ahead = blocks[min(index + lead - count, count - 1), 2] + between_kinds
        place, following = head.cache + 4 * dim * blocks[index, 2], head.cache + 4 * dim * ahead
        if not in_place:
            place = following = _gather(head, head.keys, spans, token, position, ahead, held)
        first, after = spans.firsts[token], spans.ends[token]
        spot = scores + (token - low) * per_kv * apart + 4 * (position - first // BLOCK * BLOCK)
        query = head.qkv + token * head.tokens_apart
        for own in range(per_kv):
            if per_kv == 1:
                made = _dots(query, place, wide, dim // 16, following)
            else:
                ask_at = following + own * 8 * wide if own < 2 else place
                made = _dots_half(query + own * wide, place, wide, dim // 16, ask_at)
            made = multiply(made, splat(scale))
            if softcap > 0:
                made = capped(made, softcap)
            store(spot + own * apart, between(made, first - position, after - position))
    for token in range(low, end):
        size = (spans.ends[token] + BLOCK - 1) // BLOCK * BLOCK - spans.firsts[token] // BLOCK * BLOCK
        for own in range(per_kv):
            place = scores + ((token - low) * per_kv + own) * apart
            if spans.tree_ats[token] >= 0:
                _hide(place, token, spans)
            _weigh(place, size, head.out + wide * (token * head.heads + own), dim, states[token, own])
    for index in range(count):
        token, position = blocks[index, 0], blocks[index, 1]
        ahead = blocks[min(index + lead, count - 1), 2] + between_kinds
        if index + lead >= count:
            ahead = blocks[min(index + lead - count, count - 1), 2] + shift
        place, following = head.cache + 4 * dim * (blocks[index, 2] + between_kinds), head.cache + 4 * dim * ahead
        if not in_place:
            place = following = _gather(head, head.values, spans, token, position, ahead, held)
        first, after = spans.firsts[token], spans.ends[token]
        # Values before the first one are skipped, since they may be anything.
        skipped, out = max(first - position, 0), head.out + wide * token * head.heads
        weights = scores + (token - low) * per_kv * apart + 4 * (position - first // BLOCK * BLOCK + skipped)
        values, size = (place + skipped * wide, following + skipped * wide), min(BLOCK, after - position) - skipped
        _mix(out, weights, apart, values, dim, per_kv, size)
    for token in range(low, end):
        for own in range(per_kv):
            factor, out = splat(np.float32(1) / states[token, own, 1]), head.out + wide * (token * head.heads + own)
            for i in range(0, dim, 16):
                store(out + 4 * i, multiply(load(out + 4 * i), factor))


@function
def _list(head: Any, low: int, end: int, spans: Spans, listed: int) -> int:
    """Writes of each block its token, its first position and the place of its first key, in the order in which they are
    read, and returns how many they are."""
    most, count = 0, 0
    for token in range(low, end):
        most = max(most, (spans.ends[token] + BLOCK - 1) // BLOCK - spans.firsts[token] // BLOCK)
    blocks = int64_array(listed, ((end - low) * most, 3))
    for column in range(most):
        for token in range(low, end):
            block = spans.firsts[token] // BLOCK + column
            if BLOCK * block < spans.ends[token]:
                blocks[count, 0], blocks[count, 1], blocks[count, 2] = token, BLOCK * block, 0
                if head.page_size == BLOCK:
                    pages = int64_array(head.pages + 8 * spans.rows[token] * head.columns, head.columns)
                    blocks[count, 2] = head.keys + pages[block] * BLOCK
                count += 1
    return count


@function
def _gather(head: Any, kind: int, spans: Spans, token: int, position: int, ahead: int, held: int) -> int:
    """The address of a block that is not read where it is. Asks for the one at the place ``ahead``."""
    if head.page_size == BLOCK:
        ask(head, ahead)
    return block_of(head, kind, spans.rows[token], position, spans.ends[token], held)


@function
def _hide(scores: int, token: int, spans: Spans) -> None:
    """Of a token's keys from the first of the tree on only those whose byte is not 0 are seen."""
    first, end, begin = spans.firsts[token], spans.ends[token], spans.tree_begins[token]
    begun = first // BLOCK * BLOCK
    mine = float32_array(scores, end - begun)
    for position in range(max(first, begin), end):
        if not spans.tree[spans.tree_ats[token] + position - begin]:
            mine[position - begun] = -np.inf


@function
def _weigh(scores: int, size: int, out: int, dim: int, state: Any) -> None:
    """Makes scores weights relative to the largest one and to that of what was attended to before, and ``out`` too."""
    before, weights = state[0], state[1]
    top = splat(before)
    for i in range(0, size, 16):
        top = maximum(top, load(scores + 4 * i))
    most = largest(top)
    sums = total(exponentials(scores, size, most))
    kept = exp32(before - most)
    for i in range(0, dim, 16):
        # What is there of nothing may be anything.
        store(out + 4 * i, multiply(load(out + 4 * i), splat(kept)) if weights > 0 else splat(np.float32(0)))
    state[0], state[1] = most, kept * weights + sums


@function
def _mix(out: int, weights: int, apart: int, values: Any, dim: int, rows: int, count: int) -> None:
    """Adds ``count`` values to each of ``rows`` rows, with weights of its own that lie ``apart`` bytes apart.
    ``values``: where they are, and what is asked for meanwhile."""
    wide, most, row, (start, ahead) = 4 * dim, dim // 64 * 64, 0, values
    while row < rows:
        place, own, some = out + row * wide, weights + row * apart, 4 if rows - row >= 4 else min(rows - row, 2)
        if row:
            ahead = start
        for i in range(0, most, 64):
            if some == 4:
                _mix4_wide(place + 4 * i, own, apart, start + 4 * i, wide, count, ahead + 4 * i)
            elif some == 2:
                _mix2_wide(place + 4 * i, own, apart, start + 4 * i, wide, count, ahead + 4 * i)
            else:
                _mix1_wide(place + 4 * i, own, apart, start + 4 * i, wide, count, ahead + 4 * i)
        for i in range(most, dim, 16):
            if some == 4:
                _mix4(place + 4 * i, own, apart, start + 4 * i, wide, count, ahead + 4 * i)
            elif some == 2:
                _mix2(place + 4 * i, own, apart, start + 4 * i, wide, count, ahead + 4 * i)
            else:
                _mix1(place + 4 * i, own, apart, start + 4 * i, wide, count, ahead + 4 * i)
        row += some
