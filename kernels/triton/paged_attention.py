"""Attention to keys and values in pages, in Triton.

A program computes one tile for one key-value head. Row ``m`` of the tile is query ``m // GROUP`` of head ``m % GROUP``
of those that share the keys, so that these are read once. Softmax is computed in base 2, as the
hardware does: scores are multiplied by ``log2(e)``, and the log-sum-exps of partial results are to base 2 too.

Keys and values of 8 bits are converted to float16, which holds them exactly. A key's scale multiplies its scores and a
value's its weights, which are fewer numbers than the keys and values. The queries become float16 as well, each divided
by its largest number first, so that none is too large.

Keys and values of 4 bits (``kernels.common.int4``) are multiplied by their scales as float16. The queries are rotated
before, and the results after, as their groups are. A byte is read for both of its numbers, which lie half a vector
apart; the second read hits a cache.

Reads after the last key are clamped to the last key instead of being masked: what is read is then always a number of
the step, and its weight is zero.

If a token has one vector that is its key and its value (``LATENT``), it is read once. If the value is in its last
numbers, such as 512 of 576, it is read in two parts: as many last numbers as the largest power of two, and the ``REST``
before them, of which no results are computed.

A query head's sink is one more score, without a value. It is counted once: by the tile that computes a result, or by
the merge of partial results, which leave it out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.attention_schedule import FIELDS, LOW, AttentionTiles
from kernels.common.int4 import INT4
from kernels.common.paged_keys import PagedKeys
from kernels.triton.int4 import rotate_groups

_FIELDS = tl.constexpr(FIELDS)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _to_float16(x):
    """Convert 8-bit numbers to float16.

    With the right upper byte a byte is the float16 1024 + byte, which is far faster than a conversion.
    """
    if x.dtype == tl.int8:
        bits = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        return x.to(tl.float16)


@triton.jit
def _locate_codes(dim, HALF: tl.constexpr):
    """Return the bytes of some numbers of a vector of 4 bits, and the shifts of their codes."""
    byte = tl.max_contiguous(tl.multiple_of(dim % HALF, 16), 16)
    return byte, (dim // HALF * 4).to(tl.uint8)


@triton.jit
def _code_half(x, shift):
    """Convert 4-bit codes in bytes to float16, from -7.5 to 7.5; see ``_to_float16``."""
    bits = ((x >> shift) & 15).to(tl.uint16) | 0x6400
    return bits.to(tl.float16, bitcast=True) - 1024.0 - 7.5


@triton.jit
def _load_packed_keys(
    keys, scales, slot,
    DIM: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return ``COUNT`` numbers from ``FIRST`` on of rotated keys of 4 bits as float16, ``[WIDE, KEYS]``."""
    dim, group = tl.arange(0, WIDE), tl.arange(0, WIDE // 32)
    byte, shift = _locate_codes(FIRST + dim, DIM // 2)
    x = tl.load(keys + slot[None, :] * (DIM // 2) + byte[:, None], mask=dim[:, None] < COUNT, other=0)
    scales += slot[None, :] * (DIM // 32) + FIRST // 32 + group[:, None]
    scale = tl.load(scales, mask=group[:, None] < COUNT // 32, other=0.0)
    numbers = tl.reshape(_code_half(x, shift[:, None]), (WIDE // 32, 32, KEYS)) * scale[:, None, :]
    return tl.reshape(numbers, (WIDE, KEYS))


@triton.jit
def _load_keys(
    keys, scales, slot,
    DIM: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
    QUANTIZED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return ``COUNT`` numbers from ``FIRST`` on of keys, ``[WIDE, KEYS]``; of 8 bits without their scales."""
    dim = tl.arange(0, WIDE)
    if PACKED:
        k = _load_packed_keys(keys, scales, slot, DIM, FIRST, COUNT, WIDE, KEYS)
    elif WIDE == COUNT:
        k = tl.load(keys + slot[None, :] * DIM + FIRST + dim[:, None])
    else:
        k = tl.load(keys + slot[None, :] * DIM + FIRST + dim[:, None], mask=dim[:, None] < COUNT, other=0.0)
    if QUANTIZED and not PACKED:
        k = _to_float16(k)
    return k


@triton.jit
def _load_packed_values(values, scales, slot, DIM: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr):
    """Return rotated values ``[KEYS, WIDE]`` of 4 bits as float16."""
    dim, group = tl.arange(0, WIDE), tl.arange(0, WIDE // 32)
    byte, shift = _locate_codes(dim, DIM // 2)
    x = tl.load(values + slot[:, None] * (DIM // 2) + byte[None, :], mask=dim[None, :] < DIM, other=0)
    scale = tl.load(scales + slot[:, None] * (DIM // 32) + group[None, :], mask=group[None, :] < DIM // 32, other=0.0)
    numbers = tl.reshape(_code_half(x, shift[None, :]), (KEYS, WIDE // 32, 32)) * scale[:, :, None]
    return tl.reshape(numbers, (KEYS, WIDE))


@triton.jit
def attend_block(
    q, q_rest, top, total, mixed, position, mask_row, start, end, tree, tree_start, keys, values,
    key_scales, value_scales, pages, positions, scale, softcap, window,
    PAGE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, KEYS: tl.constexpr,
    QUANTIZED: tl.constexpr, PACKED: tl.constexpr, LATENT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    TREES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: ``KEYS`` keys from ``start`` on."""
    # Vectors of one part are DIM numbers, in WIDE places; those of two are the WIDE last ones and those before.
    first: tl.constexpr = DIM - WIDE if REST else 0
    count: tl.constexpr = WIDE if REST else DIM
    key = start + tl.arange(0, KEYS)
    read = tl.minimum(key, end - 1) if MASKED else key
    slot = tl.load(pages + read // PAGE) * PAGE + read % PAGE
    dim = tl.arange(0, WIDE)
    k = _load_keys(keys, key_scales, slot, DIM, first, count, WIDE, KEYS, QUANTIZED, PACKED)
    scores = tl.dot(q, k, input_precision="ieee")
    if REST:
        k_rest = _load_keys(keys, key_scales, slot, DIM, 0, first, REST, KEYS, QUANTIZED, PACKED)
        scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
    scores *= scale
    if QUANTIZED and not PACKED:
        scores *= tl.load(key_scales + slot)[None, :]
    if CAPPED:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    scores *= _LOG2_E
    if MASKED:
        visible = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        key_position = key
        if TREES:
            behind = key - tree
            in_tree = (behind >= 0) & (key < end)
            word = tl.load(mask_row[:, None] + (behind >> 5)[None, :], mask=in_tree[None, :], other=0)
            visible = tl.where(in_tree[None, :], ((word >> (behind & 31)[None, :]) & 1) != 0, visible)
            if WINDOWED:
                key_position = tl.where(in_tree, tl.load(positions + tree_start + behind, mask=in_tree, other=0), key)
        if WINDOWED:
            visible &= key_position[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A query that has attended to no key yet has no largest score, and minus infinity minus itself is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(weights, axis=1)
    if LATENT:
        v = tl.trans(k)
    elif PACKED:
        v = _load_packed_values(values, value_scales, slot, DIM, WIDE, KEYS)
    elif WIDE == DIM:
        v = tl.load(values + slot[:, None] * DIM + dim[None, :])
    else:
        v = tl.load(values + slot[:, None] * DIM + dim[None, :], mask=dim[None, :] < DIM, other=0.0)
    if QUANTIZED and not PACKED:
        if not LATENT:
            v = _to_float16(v)
        weights *= tl.load(value_scales + slot)[None, :]
    mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None], input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def load_queries(
    q, inside, scale, DIM: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Return both parts of queries, ``[ROWS, WIDE]`` and ``[ROWS, REST]``, and the factors ``[ROWS, 1]`` of their
    scores. ``q``: ``[ROWS]`` pointers to their first numbers.

    For ``QUANTIZED`` keys the queries become float16, each divided by its largest number.
    """
    first: tl.constexpr = DIM - WIDE if REST else 0
    count: tl.constexpr = WIDE if REST else DIM
    dim = tl.arange(0, WIDE)
    mask = inside[:, None] & (dim < count)[None, :]
    query = tl.load(q[:, None] + first + dim[None, :], mask=mask, other=0.0)
    rest = query
    if REST:
        dim = tl.arange(0, REST)
        rest = tl.load(q[:, None] + dim[None, :], mask=inside[:, None] & (dim < first)[None, :], other=0.0)
    factor = tl.full((query.shape[0], 1), scale, tl.float32)
    if QUANTIZED:
        largest = tl.max(tl.abs(query.to(tl.float32)), axis=1)
        if REST:
            largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), axis=1))
        largest = tl.maximum(largest, 1e-30)[:, None]
        query = (query.to(tl.float32) / largest).to(tl.float16)
        rest = (rest.to(tl.float32) / largest).to(tl.float16)
        factor *= largest
    return query, rest, factor


@triton.jit
def locate_results(target, inside, DIM: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr):
    """Return the pointers to results ``[ROWS, WIDE]``, and which of them exist. ``target``: ``[ROWS]`` pointers to the
    first numbers."""
    first: tl.constexpr = DIM - WIDE if REST else 0
    dim = first + tl.arange(0, WIDE)
    return target[:, None] + dim[None, :], inside[:, None] & (dim < DIM)[None, :]


# Values that differ between steps must not be specialised for: a step would wait for a compilation.
@triton.jit(do_not_specialize=["window", "pages_stride", "sees_stride"])
def _attend(
    q, keys, values, key_scales, value_scales, sinks, tiles, tokens, positions, pages, sees, out, partial_out,
    partial_total, scale, softcap, window, q_token_stride, q_head_stride, key_head_stride, value_head_stride,
    scale_head_stride, pages_stride, sees_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, QUANTIZED: tl.constexpr, PACKED: tl.constexpr,
    LATENT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, TREES: tl.constexpr, SINKS: tl.constexpr,
    LOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute ``ROWS`` rows of one tile for one key-value head. One piece: its state is in registers, its parts take 20
    arguments."""
    tile = tiles + tl.program_id(0) * _FIELDS
    head = tl.program_id(1)
    count = tl.load(tile + 2)
    line = tl.arange(0, ROWS)
    if SPLIT:
        line += tl.program_id(2) * ROWS
        count = tl.where(tl.program_id(2) * ROWS < count * GROUP, count, 0)
    if count == 0:
        return
    row, first, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 3), tl.load(tile + 4)
    free, tree, tree_start, partial = tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7), tl.load(tile + 8)
    entry, query_head = line // GROUP, head * GROUP + line % GROUP
    inside = entry < count
    token = tl.load(tokens + first + entry, mask=inside, other=0)
    position = tl.load(positions + token, mask=inside, other=0)
    query, rest, factor = load_queries(
        q + token.to(tl.int64) * q_token_stride + query_head * q_head_stride, inside, scale, DIM, WIDE, REST, QUANTIZED
    )
    if QUANTIZED:
        key_scales += head.to(tl.int64) * scale_head_stride
        value_scales += head.to(tl.int64) * scale_head_stride
    keys += head.to(tl.int64) * key_head_stride
    values += head.to(tl.int64) * value_head_stride
    pages += row.to(tl.int64) * pages_stride
    mask_row = sees + token.to(tl.int64) * sees_stride
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDE), tl.float32)
    masked = begin
    if not LOW:
        # Most keys of a prompt are seen by all queries of a tile and need no mask. Low tiles wait for memory anyway.
        masked = begin + (free - begin) // KEYS * KEYS
        for start in range(begin, masked, KEYS):
            top, total, mixed = attend_block(
                query, rest, top, total, mixed, position, mask_row, start, end, tree, tree_start, keys,
                values, key_scales, value_scales, pages, positions, factor, softcap, window, PAGE, DIM, WIDE, REST,
                KEYS, QUANTIZED, PACKED, LATENT, CAPPED, WINDOWED, TREES, False,
            )  # fmt: skip
    for start in range(masked, end, KEYS):
        top, total, mixed = attend_block(
            query, rest, top, total, mixed, position, mask_row, start, end, tree, tree_start, keys, values,
            key_scales, value_scales, pages, positions, factor, softcap, window, PAGE, DIM, WIDE, REST, KEYS, QUANTIZED,
            PACKED, LATENT, CAPPED, WINDOWED, TREES, True,
        )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + query_head).to(tl.float32) * _LOG2_E
        total += tl.where(partial < 0, tl.exp2(sink - top), 0.0)
    total = tl.where(total == 0.0, 1.0, total)  # no 0 / 0 for a query without keys here, which its largest score marks
    mixed = mixed / total[:, None]
    if partial < 0:
        target = out + (token.to(tl.int64) * HEADS + query_head) * DIM
        target, mask = locate_results(target, inside, DIM, WIDE, REST)
        tl.store(target, mixed.to(out.dtype.element_ty), mask=mask)
    else:
        index = (partial + entry).to(tl.int64) * HEADS + query_head
        parts, mask = locate_results(partial_out + index * DIM, inside, DIM, WIDE, REST)
        tl.store(parts, mixed, mask=mask)
        tl.store(partial_total + index, top + tl.log2(total), mask=inside)


@triton.jit
def merge_parts(
    out, partial_out, partial_total, sinks, merged, partials,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one token and head, each weighted by its share of the sum of exponentials."""
    about = merged + tl.program_id(0) * 3
    head = tl.program_id(1)
    count = tl.load(about + 2)
    if count == 0:
        return
    token, first = tl.load(about), tl.load(about + 1)
    dim = tl.arange(0, WIDE)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    if SINKS:
        top = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total = tl.full((), 1.0, tl.float32)
    mixed = tl.zeros((WIDE,), tl.float32)
    for begin in range(0, count, PARTS):
        part = begin + tl.arange(0, PARTS)
        inside = part < count
        index = tl.load(partials + first + part, mask=inside, other=0).to(tl.int64) * HEADS + head
        sums = tl.load(partial_total + index, mask=inside, other=float("-inf"))
        mask = inside[:, None] & (dim < DIM)[None, :]
        values = tl.load(partial_out + index[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(sums, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shares = tl.exp2(sums - base)
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(shares, axis=0)
        mixed = mixed * kept + tl.sum(shares[:, None] * values, axis=0)
        top = new_top
    target = out + (token.to(tl.int64) * HEADS + head) * DIM + dim
    tl.store(target, (mixed / total).to(out.dtype.element_ty), mask=dim < DIM)


def launch(
    q: Tensor, cache: PagedKeys, plan: AttentionTiles, *,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None = None,
    merges_in_order: bool = False,
) -> Tensor:  # fmt: skip
    """``kernels.attention.paged.paged_attention`` of CUDA tensors."""
    tokens, heads, dim = q.shape
    kv_heads, _, page, _ = cache.keys.shape
    group, (wide, rest) = heads // kv_heads, split_vector(cache, dim)
    quantized, packed = cache.key_scales is not None, cache.keys.dtype == INT4
    scale_stride = 0 if cache.key_scales is None else cache.key_scales.stride(0)
    rotated = rotate_groups(q, torch.float32) if packed else q
    out = torch.empty((tokens, heads, dim), dtype=rotated.dtype, device=q.device)
    partial_out = torch.empty((len(plan.partials), heads, dim), device=q.device)
    partial_total = torch.empty((len(plan.partials), heads), device=q.device)
    low_height = max(LOW, triton.next_power_of_2(group))
    if rest and cache.keys.element_size() == 2:
        # Vectors that are read as two operands are loaded ahead only for the matrix units' largest tiles.
        low_height = max(low_height, 64)
    for tiles, rows, low in ((plan.low, low_height, True), (plan.high, plan.height, False)):
        if not len(tiles):
            continue
        trees = plan.sees is not None and not low
        # Sixteen rows at once: registers hold no more results of latents beside the conversion of 4-bit codes.
        parts = rows // LOW if rest and packed else 1
        sees = plan.sees if plan.sees is not None else plan.tokens
        _attend[(len(tiles), kv_heads, parts)](
            rotated, cache.keys, cache.values, cache.key_scales, cache.value_scales, sinks, tiles, plan.tokens,
            plan.positions, plan.pages, sees, out, partial_out, partial_total, scale, softcap or 1.0,
            window or 0, rotated.stride(0), rotated.stride(1), cache.keys.stride(0), cache.values.stride(0),
            scale_stride, plan.pages.stride(0), sees.stride(0),
            HEADS=heads, GROUP=group, PAGE=page, DIM=dim, WIDE=wide, REST=rest, ROWS=rows // parts, QUANTIZED=quantized,
            PACKED=packed, LATENT=cache.is_latent, CAPPED=softcap is not None, WINDOWED=window is not None, TREES=trees,
            SINKS=sinks is not None, LOW=low or (rest > 0 and (trees or quantized)), SPLIT=parts > 1,
            **choose_tuning(rows // parts, wide, cache.keys.element_size(), low, trees),
        )  # fmt: skip
    if len(plan.merged):
        merge_parts[(len(plan.merged), heads)](
            out, partial_out, partial_total, sinks, plan.merged, plan.partials, HEADS=heads, DIM=dim,
            PARTS=1 if merges_in_order else 16, SINKS=sinks is not None, **choose_merge_sizes(dim),
        )  # fmt: skip
    return rotate_groups(out, q.dtype) if packed else out


def split_vector(cache: PagedKeys, dim: int) -> tuple[int, int]:
    """Return the places of a vector's last part and of the part before it, 0 if it has one part."""
    whole = max(16, triton.next_power_of_2(dim))
    if whole == dim or cache.num_values is None or not 16 <= cache.num_values <= whole // 2:
        return whole, 0
    return whole // 2, max(16, triton.next_power_of_2(dim - whole // 2))


def choose_merge_sizes(dim: int) -> dict[str, int]:
    """Return the places of a merged result and the warps."""
    wide = max(16, triton.next_power_of_2(dim))
    return {"WIDE": wide, "num_warps": 2 if wide <= 256 else wide // 64}


def choose_tuning(rows: int, wide: int, size: int, low: bool, trees: bool) -> dict[str, int]:
    """Return the keys of a block, the warps, and the stages of the pipeline of loads; page numbers take two of them.

    Longer keys and tree masks need more registers, and so fewer keys or stages; 8-bit keys, which must be converted,
    most of all. Products in float32 have their operands in registers too: more warps have more of them. So do the
    results of vectors of 512 numbers.
    """
    if size == 4 and (not low or wide > 256):
        return {"KEYS": 16, "num_warps": 16 if rows * wide >= 8192 else 8, "num_stages": 2}
    keys = (64 if wide <= 128 else 32 if low or size > 1 else 16) // (2 if trees or (wide > 256 and rows > LOW) else 1)
    stages = 5 if low else 2 if rows >= 128 or (keys <= 16 and wide <= 256) else 3
    needs_warps = rows >= 128 or wide > 256
    return {"KEYS": max(16, keys), "num_warps": 8 if needs_warps else 4, "num_stages": stages}
