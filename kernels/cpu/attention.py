"""Attention over the paged cache in one kernel a layer, and what comes before it: normalising and turning queries and
keys, writing keys and values.

Queries, keys and values of a step's tokens lie together, ``[tokens, heads + 2 kv_heads, dim]``, as their projection
left them. The cache of one layer is ``[2, kv_heads, slots, dim]``, keys before values. Everything is float32 and
contiguous, ``dim`` a multiple of 16. The cache may be int8 or float8 too, with a float32 scale for each token, head and
kind, ``[2, kv_heads, slots]``: sixteen keys or values become float32 where they are read, once for all queries that
meet them there.

A token's keys come in pieces. Those that several tokens see whole are attended to by all of these together, tile by
tile with an online softmax (Dao et al. 2022, https://arxiv.org/abs/2205.14135): the keys are read once, and products
with them are matrix products. What is left each token reads for itself. What a token gets depends on how its keys are
cut into pieces, and on nothing else: not on the other tokens of a step, nor on the number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.cpu.launch import begin, flags, floats, function, inlined, kernel, longs, number, share
from kernels.cpu.narrow import load_float8, load_int8, magnitude, store_float8, store_int8
from kernels.cpu.vector import (
    TALL,
    add,
    block_mixer,
    divide,
    dots,
    exceeds,
    exp,
    largest,
    load,
    maximum,
    mixer,
    multiply,
    prefetch,
    score,
    splat,
    store,
    subtract,
    total,
    transpose,
)

_ROWS = 64
"""Queries in a tile, one for each of its tokens' heads."""
_KEYS = 64
"""Keys of a tile. With their values and the scores they fit into the first-level cache."""
_LEEWAY = np.float32(8)
"""How far above what weights are relative to a score may be, before that is changed."""
STEP_WORDS = 17
"""Words that tell ``attend`` of a step."""
_APART = _KEYS + 16
"""Floats between two queries' scores; a power of two would have them share a few places of the cache."""
KINDS = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2}
"""What a cache may be of, as the kernels are told it."""
_INT8 = KINDS[torch.int8]
_FORESIGHT = 64
"""Keys of 8 bits between what is widened and what is asked for: they come four times as fast as float32."""
_SOME = 1 << 40
"""A length for arrays that are as long as their indices reach."""

_mix, _mix_wide, _mix4, _mix4_wide = mixer(1, 1), mixer(1, 4), mixer(4, 1), mixer(4, 4)
_mix_blocks, _mix_blocks_wide = block_mixer(4, 1), block_mixer(4, 4)


def tile_tokens(heads_per_kv: int) -> int:
    """Tokens of one row that are best attended together to what they all see."""
    return max(1, _ROWS // heads_per_kv)


def scratch_floats(dim: int, heads_per_kv: int, longest: int) -> int:
    """What each thread of ``attend`` needs where no token reads more than ``longest`` keys for itself."""
    return _ROWS * (2 * dim + _APART + 17) + 16 + (32 + _KEYS) * dim + heads_per_kv * _padded(longest)


def _padded(longest: int) -> int:
    return (longest + 47) // 16 * 16


@kernel
def rotary_write(address: Any) -> None:
    """``(qkv, weight, eps, cos, sin, step, cache, scales, kind, tokens, heads, kv_heads, dim, turned, capacity)``:
    normalises queries and keys in place unless ``weight`` (``[heads + kv_heads, dim]``) is 0, turns their first
    ``turned`` coordinates by ``cos`` and ``sin`` (``[tokens, turned]``, see ``rotary_tables``), and writes keys and
    values into ``cache`` of ``capacity`` slots at ``slots`` ``[tokens]`` of the ``step`` that ``attend`` takes.
    ``kind``: one of ``KINDS``; ``scales`` are 0 for float32."""
    a, thread, threads = begin(address)
    tokens, heads, kv_heads, dim, turned, capacity = a[9], a[10], a[11], a[12], a[13], a[14]
    turning, half = heads + kv_heads, turned // 2
    qkv, weight = floats(a[0], (tokens, turning + kv_heads, dim)), floats(a[1], (turning, dim))
    cos, sin = floats(a[3], (tokens, turned)), floats(a[4], (tokens, turned))
    slots = longs(longs(a[5], STEP_WORDS)[16], tokens)
    first, end = share(tokens, thread, threads)
    for token in range(first, end):
        slot = slots[token]
        for head in range(turning):
            x = qkv[token, head]
            if a[1]:
                squares = np.float32(0)
                for i in range(dim):
                    squares += x[i] * x[i]
                factor = np.float32(1 / np.sqrt(np.float64(squares) / dim + number(a[2])))
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
    floats(scales, _SOME)[place] = scale
    for i in range(0, dim, 16):
        part = divide(load(source + 4 * i), splat(scale))
        if kind == _INT8:
            store_int8(cache + dim * place + i, part)
        else:
            store_float8(cache + dim * place + i, part)


class _Head(NamedTuple):
    """Where one key-value head's keys and values are, and how its queries attend. Addresses and counts."""

    qkv: int
    """Its first query of the first token."""
    out: int
    """The same query's result."""
    keys: Any
    """And their scales."""
    values: Any
    kind: int
    pages: int
    tokens_apart: int
    """Bytes between two tokens' queries."""
    heads: int
    per_kv: int
    dim: int
    page_size: int
    columns: int
    scratch: int


@kernel
def attend(address: Any) -> None:
    """``(qkv, cache, scales, kind, out, step, heads, kv_heads, dim, capacity, page_size, groups, scale, softcap)``, and
    at ``step``
    ``(scratch, pages, rows, first, end, tree_begin, tree_at, tree, pieces, members, total, tokens, columns, count,
    longest, apart, slots)``, so that a tape can be repeated for another step.

    Token ``i`` of ``tokens`` belongs to row ``rows[i]`` of the page table ``pages`` ``[rows, columns]`` and reads the
    keys ``first[i]`` until ``end[i]`` for itself, of which there are 1 to ``longest``. Where ``tree_at[i]`` is not
    negative, of the keys from ``tree_begin[i]`` on only those whose byte in ``tree``, from ``tree_at[i]`` on, is not 0.
    ``page_size``: 16, or no multiple of 16.

    ``pieces`` ``[count, 5]``: row, first key (on the edge of a page), end, and where the piece's tokens stand in
    ``members``, first and end, in rising order. ``out`` ``[tokens, heads, dim]`` gets the result and ``total``
    ``[tokens, heads]`` the log-sum-exps. ``softcap``: see ``LayerAttention``, 0 for none. ``scratch``: ``[threads,
    apart]``, see ``scratch_floats``. Threads divide the heads, and ``groups`` ranges of the tokens.
    """
    a, thread, threads = begin(address)
    s = longs(a[5], STEP_WORDS)
    tokens, heads, kv_heads, dim, count, groups = s[11], a[6], a[7], a[8], s[13], a[11]
    per_kv, longest, kind = heads // kv_heads, s[14], a[3]
    scale, softcap = np.float32(number(a[12])), np.float32(number(a[13]))
    keys_apart = a[9] * dim * (1 if kind else 4)
    rows, firsts, ends = longs(s[2], tokens), longs(s[3], tokens), longs(s[4], tokens)
    tree_begins, tree_ats, tree = longs(s[5], tokens), longs(s[6], tokens), flags(s[7], _SOME)
    pieces, members, totals = longs(s[8], (count, 5)), longs(s[9], _SOME), floats(s[10], (tokens, heads))
    for part in range(thread, groups * kv_heads, threads):
        index = part % kv_heads
        begins, after = share(tokens, part // kv_heads, groups)
        head = _Head(
            a[0] + 4 * dim * per_kv * index,
            a[4] + 4 * dim * per_kv * index,
            (a[1] + keys_apart * index, a[2] + 4 * a[9] * index),
            (a[1] + keys_apart * (kv_heads + index), a[2] + 4 * a[9] * (kv_heads + index)),
            kind,
            s[1],
            4 * dim * (heads + 2 * kv_heads),
            heads,
            per_kv,
            dim,
            a[10],
            s[12],
            s[0] + 4 * s[15] * thread,
        )
        sums = totals[:, per_kv * index : per_kv * (index + 1)]
        for token in range(begins, after):
            for own in range(per_kv):
                sums[token, own] = -np.inf
        for piece in range(count):
            low, high = pieces[piece, 3], pieces[piece, 4]
            while low < high and members[low] < begins:
                low += 1
            while low < high and members[high - 1] >= after:
                high -= 1
            step = max(1, _ROWS // per_kv)
            for some in range(low, high, step):
                _tile(head, pieces[piece], members[some : min(some + step, high)], sums, scale, softcap)
        for token in range(begins, after):
            keys, after_it = (rows[token], firsts[token], ends[token]), min(token + 1, tokens - 1)
            following, branch = (rows[after_it], firsts[after_it]), (tree_begins[token], tree_ats[token])
            _own(head, token, keys, following, branch, tree, longest, sums, scale, softcap)


@function
def _tile(head: Any, piece: Any, tokens: Any, totals: Any, scale: Any, softcap: Any) -> None:
    """Attends from some tokens to all keys of a piece."""
    dim, per_kv, row, first, end = head.dim, head.per_kv, piece[0], piece[1], piece[2]
    wide, count = 4 * dim, len(tokens) * per_kv
    queries, mixed = head.scratch, head.scratch + _ROWS * wide
    scores = mixed + _ROWS * wide
    sums = scores + 4 * _ROWS * _APART
    tops, rest = floats(sums + 64 * _ROWS, _ROWS), sums + 68 * _ROWS
    # At least two parts, each of which asks for half of the values.
    parts = max(min(2, count), (count + TALL - 1) // TALL)
    for part in range(parts):
        low, high = share(count, part, parts)
        turned = floats(queries + low * wide, (dim, high - low))
        for query in range(low, high):
            source = floats(head.qkv + tokens[query // per_kv] * head.tokens_apart + query % per_kv * wide, dim)
            for i in range(dim):
                turned[i, query - low] = source[i] * scale
    for query in range(count):
        tops[query] = -np.inf
        store(sums + 64 * query, splat(np.float32(0)))
    # Up to three queries more, which get nothing of each value: four are mixed at a time.
    padded = (count + 3) // 4 * 4
    for query in range(count, padded):
        for i in range(0, _KEYS, 16):
            store(scores + 4 * (query * _APART + i), splat(np.float32(0)))
    for i in range(0, padded * wide, 64):
        store(mixed + i, splat(np.float32(0)))
    for begun in range(first, end, _KEYS):
        size = min(_KEYS, end - begun)
        _score_tile(head, row, (begun, size, end), queries, (count, parts), scores, rest)
        for query in range(count):
            place, mine = scores + 4 * query * _APART, sums + 64 * query
            tops[query] = _online(place, size, tops[query], mine, mixed + query * wide, dim, softcap)
        _mix_tile(head, row, (begun, size, end), scores, mixed, padded, rest)
    for query in range(count):
        token, own = tokens[query // per_kv], query % per_kv
        state = tops[query], total(load(sums + 64 * query))
        _merge(head.out + wide * (token * head.heads + own), mixed + query * wide, dim, state, totals, token, own)


@inlined
def _score_tile(head: Any, row: int, keys: Any, queries: int, shape: Any, scores: int, rest: int) -> None:
    """The products of queries, which lie turned in several parts, with a tile's keys. Asks for the tile's values, or
    for the next keys where the queries are so few that mixing is too short to ask for them."""
    dim, (begun, size, end), (count, parts) = head.dim, keys, shape
    wide, turned, held = 4 * dim, rest, rest + 128 * dim
    for block in range(0, size, 32):
        for half in range(2):
            # Where no keys are left any will do: their scores are hidden.
            position = begun + (block + 16 * half if block + 16 * half < size else block)
            place = _block(head, head.keys, row, position, end, held)
            for i in range(0, dim, 16):
                transpose(place + 4 * i, wide, turned + 128 * i + 64 * half, 128)
        for part in range(parts):
            low, high = share(count, part, parts)
            out = scores + 4 * (low * _APART + block)
            following, offset = queries, block + 16 * part
            if part < 2 and count > 4:
                following = _ahead(head, head.values, row, begun + offset, end)
            elif part < 2:
                following = _ahead(head, head.keys, row, begun + offset + 32, end)
            score(high - low, queries + low * wide, turned, dim, out, 4 * _APART, following)


@inlined
def _mix_tile(head: Any, row: int, keys: Any, scores: int, mixed: int, rows: int, rest: int) -> None:
    """Adds to each row a tile's values times their weights. Asks for the next tile's keys."""
    dim, (begun, size, end) = head.dim, keys
    wide, most, held = 4 * dim, dim // 64 * 64, rest + 64
    blocks = longs(rest, _KEYS // 16)
    for block in range(0, size, 16):
        blocks[block // 16] = _block(head, head.values, row, begun + block, end, held + block * wide)
    for low in range(0, rows, 4):
        out, weights, following = mixed + low * wide, scores + 4 * low * _APART, mixed
        if 4 * low < _KEYS:
            following = _ahead(head, head.keys, row, begun + _KEYS + 4 * low, end)
        for i in range(0, most, 64):
            _mix_blocks_wide(out + 4 * i, weights, 4 * _APART, rest, 4 * i, wide, size, following + i * size)
        for i in range(most, dim, 16):
            _mix_blocks(out + 4 * i, weights, 4 * _APART, rest, 4 * i, wide, size, mixed)


@inlined
def _online(scores: int, size: int, before: Any, sums: int, mixed: int, dim: int, softcap: Any) -> Any:
    """Makes scores weights relative to ``before``, and adds them to the lanes of ``sums``. Where one is too large, what
    all is relative to becomes the largest score so far, for what was mixed before too. Returns it."""
    _cap(scores, size, softcap)
    padded = (size + 15) // 16 * 16
    _hide(floats(scores, padded), size, padded)
    most, top = before, load(scores)
    for i in range(16, size, 16):
        top = maximum(top, load(scores + 4 * i))
    if exceeds(top, splat(before + _LEEWAY)):
        most = largest(top)
        kept = splat(np.exp(before - most))
        store(sums, multiply(load(sums), kept))
        for i in range(0, dim, 16):
            store(mixed + 4 * i, multiply(load(mixed + 4 * i), kept))
    store(sums, add(load(sums), _exponentials(scores, size, most)))
    return most


@function
def _merge(out: int, mixed: int, dim: int, state: Any, sums: Any, token: int, own: int) -> None:
    """Adds a tile's result to what was attended to before."""
    before, here = sums[token, own], state[0] + np.log(state[1])
    most = max(before, here)
    rest, new = np.exp(before - most), np.exp(here - most)
    kept, factor = splat(rest / (rest + new)), splat(new / (rest + new) / state[1])
    for i in range(0, dim, 16):
        made = multiply(load(mixed + 4 * i), factor)
        # What is there of nothing may be anything.
        store(out + 4 * i, add(made, multiply(load(out + 4 * i), kept)) if rest > 0 else made)
    sums[token, own] = most + np.log(rest + new)


@function
def _own(
    head: Any,
    token: int,
    keys: Any,
    later: Any,
    branch: Any,
    tree: Any,
    longest: int,
    sums: Any,
    scale: Any,
    softcap: Any,
) -> None:
    """Attends from one token to keys of its row, and adds it to what was attended to before. ``later``: the row and the
    first key of the token after it."""
    dim, per_kv, (row, first, end), (tree_begin, tree_at) = head.dim, head.per_kv, keys, branch
    wide, begun = 4 * dim, first - first % 16
    size = (end - begun + 15) // 16 * 16
    apart = 4 * ((longest + 47) // 16 * 16)
    held = head.scratch + 4 * _ROWS * (2 * dim + _APART + 17) + 16 * wide
    scores = held + 32 * wide
    query, out = head.qkv + token * head.tokens_apart, head.out + wide * token * head.heads
    next_pages = longs(head.pages + 8 * later[0] * head.columns, head.columns)
    pages, in_place = longs(head.pages + 8 * row * head.columns, head.columns), head.page_size == 16 and head.kind == 0
    for position in range(begun, end, 16):
        block = following = values = query
        if in_place:
            block, values = _at(head, head.keys, pages, position), _at(head, head.values, pages, position)
            if position + 16 < end:
                following = _at(head, head.keys, pages, position + 16)
        else:
            block = _block(head, head.keys, row, position, end, held)
        for own in range(per_kv):
            made = dots(query + own * wide, block, wide, dim // 16, following if own else values)
            store(scores + own * apart + 4 * (position - begun), multiply(made, splat(scale)))
    for own in range(per_kv):
        place = scores + own * apart
        mine = floats(place, size)
        _cap(place, size, softcap)
        _hide(mine, 0, first - begun)
        _hide(mine, end - begun, size)
        if tree_at >= 0:
            for position in range(max(first, tree_begin), end):
                if not tree[tree_at + position - tree_begin]:
                    mine[position - begun] = -np.inf
        top = splat(sums[token, own])
        for i in range(0, size, 16):
            top = maximum(top, load(place + 4 * i))
        most = largest(top)
        rest = np.exp(sums[token, own] - most)
        whole = rest + total(_exponentials(place, size, most))
        for i in range(0, size, 16):
            store(place + 4 * i, multiply(load(place + 4 * i), splat(np.float32(1) / whole)))
        for i in range(0, dim, 16):
            spot = out + own * wide + 4 * i
            store(spot, multiply(load(spot), splat(rest / whole)) if rest > 0 else splat(np.float32(0)))
        sums[token, own] = most + np.log(whole)
    for position in range(begun, end, 16):
        if in_place:
            block, following = _at(head, head.values, pages, position), _at(head, head.keys, next_pages, later[1])
            # Asked for a second time, since what is asked for while much is under way may be forgotten.
            if position + 16 < end:
                following = _at(head, head.values, pages, position + 16)
            for i in range(0, 16 * wide, 64):
                prefetch(following + i)
        else:
            block = _block(head, head.values, row, position, end, held + 16 * wide)
        skipped = max(first - position, 0)
        weights, values = scores + 4 * (position - begun + skipped), block + skipped * wide
        _mix_block(out, weights, apart, values, dim, per_kv, min(16, end - position) - skipped)


@function
def _at(head: Any, source: Any, pages: Any, position: int) -> int:
    """The address of sixteen consecutive keys or values that are read where they are. Small enough to become part of
    a loop, unlike ``_block``: beside a call the processor reads ahead of less."""
    return source[0] + pages[position // 16] * 64 * head.dim


@function
def _block(head: Any, source: Any, row: int, position: int, end: int, held: int) -> int:
    """The address of sixteen consecutive keys or values; gathered to ``held`` where pages do not hold whole blocks, or
    where they have 8 bits."""
    pages, wide = longs(head.pages + 8 * row * head.columns, head.columns), 4 * head.dim
    if head.kind:
        _widen(head, source, pages, position, end, held)
        return held
    if head.page_size == 16:
        return _at(head, source, pages, position)
    for key in range(16):
        place = min(position + key, end - 1)
        slot = pages[place // head.page_size] * head.page_size + place % head.page_size
        for i in range(0, wide, 64):
            store(held + key * wide + i, load(source[0] + slot * wide + i))
    return held


@function
def _widen(head: Any, source: Any, pages: Any, position: int, end: int, held: int) -> None:
    """Writes sixteen keys or values of 8 bits to ``held`` as float32. Asks meanwhile for later ones."""
    dim, size, (codes, factors) = head.dim, head.page_size, source
    whole = size == 16
    slot = following = pages[position // size] * size + position % size
    if whole and position + _FORESIGHT < end:
        following = pages[(position + _FORESIGHT) // size] * size + (position + _FORESIGHT) % size
    prefetch(factors + 4 * following)
    for i in range(0, 16 * dim, 64):
        prefetch(codes + dim * following + i)
    scales = floats(factors, _SOME)
    for key in range(16):
        if not whole:
            place = min(position + key, end - 1)
            slot = pages[place // size] * size + place % size
        scale, out = splat(scales[slot]), held + 4 * dim * key
        for i in range(0, dim, 16):
            part = load_int8(codes + dim * slot + i) if head.kind == _INT8 else load_float8(codes + dim * slot + i)
            store(out + 4 * i, multiply(part, scale))
        slot += 1


@function
def _ahead(head: Any, source: Any, row: int, position: int, end: int) -> int:
    """The address of a block that is read next; anything where there is none in one place."""
    if position >= end or head.page_size != 16 or head.kind:
        return head.qkv
    return _block(head, source, row, position, end, 0)


@function
def _hide(scores: Any, first: int, end: int) -> None:
    # Faster than an assignment to a slice.
    for i in range(first, end):
        scores[i] = -np.inf


@function
def _cap(scores: int, size: int, softcap: Any) -> None:
    """``softcap * tanh(score / softcap)``."""
    if softcap > 0:
        for i in range(0, size, 16):
            twice = exp(multiply(load(scores + 4 * i), splat(np.float32(2) / softcap)))
            tanh = subtract(splat(np.float32(1)), divide(splat(np.float32(2)), add(twice, splat(np.float32(1)))))
            store(scores + 4 * i, multiply(tanh, splat(softcap)))


@function
def _exponentials(scores: int, size: int, most: Any) -> Any:
    """Makes each score ``exp(score - most)``. Returns the sums of its lanes."""
    sums = splat(np.float32(0))
    for i in range(0, size, 16):
        weight = exp(subtract(load(scores + 4 * i), splat(most)))
        store(scores + 4 * i, weight)
        sums = add(sums, weight)
    return sums


@function
def _mix_block(out: int, weights: int, apart: int, values: int, dim: int, rows: int, count: int) -> None:
    """Adds ``count`` values to each of ``rows`` rows, with weights of its own that lie ``apart`` bytes apart."""
    wide, most, whole = 4 * dim, dim // 64 * 64, rows // 4 * 4
    for row in range(0, whole, 4):
        place, own = out + row * wide, weights + row * apart
        for i in range(0, most, 64):
            _mix4_wide(place + 4 * i, own, apart, values + 4 * i, wide, count)
        for i in range(most, dim, 16):
            _mix4(place + 4 * i, own, apart, values + 4 * i, wide, count)
    for row in range(whole, rows):
        place, own = out + row * wide, weights + row * apart
        for i in range(0, most, 64):
            _mix_wide(place + 4 * i, own, apart, values + 4 * i, wide, count)
        for i in range(most, dim, 16):
            _mix(place + 4 * i, own, apart, values + 4 * i, wide, count)
