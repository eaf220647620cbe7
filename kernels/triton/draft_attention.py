"""Attention of draft levels, in Triton: the tiles are those of the lengths that are on the device.

Each branch has equally many queries, and its keys are cut into a fixed number of parts, so that the grid and all
addresses depend on the number of branches alone. The keys of draft tokens are one part more, and ``paged_attention``'s
merge combines them all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.attention_schedule import LOW
from kernels.common.draft_keys import DraftKeys
from kernels.common.int4 import INT4
from kernels.triton.int4 import rotate_groups
from kernels.triton.paged_attention import (
    attend_block,
    choose_merge_sizes,
    choose_tuning,
    load_queries,
    locate_results,
    merge_parts,
    split_vector,
)

_MAX_LATENT_ROWS = 64
"""Rows of a tile of queries that all read one vector a token, whose results take many registers."""


@triton.jit(do_not_specialize=["window", "pages_stride", "first_part"])
def _attend_level(
    q, keys, values, key_scales, value_scales, ends, positions, pages, sees, partial_out, partial_total, scale, softcap,
    window, q_token_stride, q_head_stride, key_head_stride, value_head_stride, scale_head_stride, pages_stride,
    first_part, tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, QUANTIZED: tl.constexpr,
    PACKED: tl.constexpr, LATENT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, TREES: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Compute one part of the keys of a branch and a key-value head. One piece: its state is in registers."""
    branch, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, ROWS)
    entry, query_head = line // GROUP, head * GROUP + line % GROUP
    inside = entry < QUERIES
    token = branch * QUERIES + tl.minimum(entry, QUERIES - 1)
    position = tl.load(positions + token).to(tl.int32)
    end = tl.load(ends + branch).to(tl.int32)
    first = 0
    if WINDOWED:
        first = tl.maximum(tl.min(position) - window + 1, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), tl.num_programs(2)), KEYS) * KEYS
    begin = first + part * share
    stop = tl.minimum(begin + share, end)
    query, rest, factor = load_queries(
        q + token.to(tl.int64) * q_token_stride + query_head * q_head_stride, inside, scale, DIM, WIDE, REST, QUANTIZED
    )
    if QUANTIZED:
        key_scales += head.to(tl.int64) * scale_head_stride
        value_scales += head.to(tl.int64) * scale_head_stride
    keys += head.to(tl.int64) * key_head_stride
    values += head.to(tl.int64) * value_head_stride
    pages += branch.to(tl.int64) * pages_stride
    mask_row = sees + token.to(tl.int64) * WORDS
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(begin, stop, KEYS):
        top, total, mixed = attend_block(
            query, rest, top, total, mixed, position, mask_row, start, stop, 0, 0, keys, values, key_scales,
            value_scales, pages, positions, factor, softcap, window, PAGE, DIM, WIDE, REST, KEYS, QUANTIZED, PACKED,
            LATENT, CAPPED, WINDOWED, TREES, True,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    index = ((first_part + part).to(tl.int64) * tokens + token) * HEADS + query_head
    parts, mask = locate_results(partial_out + index * DIM, inside, DIM, WIDE, REST)
    tl.store(parts, mixed / total[:, None], mask=mask)
    tl.store(partial_total + index, top + tl.log2(total), mask=inside)


def draft_attention(
    q: Tensor, own: DraftKeys, drafts: DraftKeys | None, merged: Tensor, partials: Tensor, *, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``kernels.attention.draft.draft_attention`` of CUDA tensors."""
    tokens, heads, dim = q.shape
    num_parts = partials.numel() // tokens
    num_own = num_parts - (drafts is not None)
    packed = own.cache.keys.dtype == INT4
    partial_out = torch.empty((num_parts, tokens, heads, dim), device=q.device)
    partial_total = torch.empty((num_parts, tokens, heads), device=q.device)
    rotated = rotate_groups(q, torch.float32) if packed else q
    _launch(rotated, own, partial_out, partial_total, 0, num_own, scale, window, softcap)
    if packed:
        partial_out[:num_own] = rotate_groups(partial_out[:num_own].flatten(0, 1), torch.float32).view(
            num_own, tokens, heads, dim
        )
    if drafts is not None:
        _launch(q, drafts, partial_out, partial_total, num_own, 1, scale, None, softcap)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    merge_parts[(tokens, heads)](
        out, partial_out, partial_total, sinks, merged, partials, HEADS=heads, DIM=dim, PARTS=16,
        SINKS=sinks is not None, **choose_merge_sizes(dim),
    )  # fmt: skip
    return out


def _launch(
    q: Tensor, part: DraftKeys, partial_out: Tensor, partial_total: Tensor, first: int, parts: int, scale: float,
    window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    tokens, heads, dim = q.shape
    cache, branches = part.cache, len(part.ends)
    queries = tokens // branches
    if cache.is_latent:
        cache = cache.regroup(_count_groups(heads, queries))
    kv_heads, _, page, _ = cache.keys.shape
    group, (wide, rest) = heads // kv_heads, split_vector(cache, dim)
    rows = max(LOW, triton.next_power_of_2(queries * group))
    trees = part.sees is not None
    sees = part.pages if part.sees is None else part.sees
    tuning = choose_tuning(rows, wide, cache.keys.element_size(), rows <= LOW, trees)
    _attend_level[(branches, kv_heads, parts)](
        q, cache.keys, cache.values, cache.key_scales, cache.value_scales, part.ends, part.positions, part.pages, sees,
        partial_out, partial_total, scale, softcap or 1.0, window or 0, q.stride(0), q.stride(1),
        cache.keys.stride(0), cache.values.stride(0), 0 if cache.key_scales is None else cache.key_scales.stride(0),
        part.pages.stride(0), first, tokens,
        HEADS=heads, GROUP=group, QUERIES=queries, PAGE=page, DIM=dim, WIDE=wide, REST=rest, ROWS=rows,
        QUANTIZED=cache.key_scales is not None, PACKED=cache.keys.dtype == INT4, LATENT=cache.is_latent,
        CAPPED=softcap is not None, WINDOWED=window is not None, TREES=trees, WORDS=sees.shape[1] if trees else 1,
        **tuning,
    )  # fmt: skip


def _count_groups(heads: int, queries: int) -> int:
    """Return the groups that query heads are computed in, whose rows fit a tile if there is a way."""
    sizes = [
        size for size in range(1, heads + 1) if heads % size == 0 and (size == 1 or size * queries <= _MAX_LATENT_ROWS)
    ]
    return heads // sizes[-1]
