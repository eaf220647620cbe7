"""Attention to keys in pages: decoding, chunks of prompts, trees of draft tokens, and shared prefixes.

Torch's own attention gets its ideal input: the keys of each sequence contiguous, of equal lengths, and not quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.kernels.measure import Case, Run, Runs, compiled
from kernels.attention.paged import paged_attention
from kernels.common.attention_schedule import (
    NO_TREE,
    AttentionTiles,
    Ints,
    Segments,
    TileBuffers,
    TileShape,
    concat_segments,
    count_busy_programs,
    pack_bits,
    plan_tiles,
    shared_prefix_segment,
)
from kernels.common.int4 import GROUP, INT4
from kernels.common.paged_keys import PagedKeys
from kernels.quantize import QUANTIZED, dequantize_vectors, quantize_vectors

_HEADS, _KV_HEADS, _DIM, _PAGE = 32, 8, 128, 16
_SCALE = _DIM**-0.5
_MAX_KEYS = 1 << 19
"""Keys of all rows together, so that torch's copies of them in float32 fit too."""
_OWN_TOKENS = 64
"""Tokens of each sequence after a shared prefix."""
_SHORT_PREFIXES = (64, 128, 256, 512)
"""Lengths of prefixes around that from which reading them once pays."""
_TREE_TOKENS = 16
"""Tokens of a tree of draft tokens, a binary one."""


@dataclass(frozen=True)
class _Step:
    rows: int
    queries: int
    context: int
    stored: torch.dtype = torch.bfloat16
    prefix: int = 0
    """Tokens that all rows share."""
    tree: bool = False


def cases(
    batches: tuple[int, ...] = (1, 16, 64), contexts: tuple[int, ...] = (1024, 4096, 32768), prompt: int = 2048
) -> Iterator[Case]:
    """Yield decoding for all batch sizes and contexts; the other kinds for the second of each."""
    for stored in (torch.bfloat16, *QUANTIZED):
        for rows in batches:
            for context in contexts:
                if rows * context > _MAX_KEYS:
                    continue
                yield _case(f"decode, {_type_name(stored)}, {rows} × {context}", _Step(rows, 1, context, stored))
    rows, context = batches[1], contexts[1]
    yield _case(f"{prompt} tokens of a prompt behind {context}", _Step(1, prompt, context + prompt))
    yield _case(f"trees of {_TREE_TOKENS} tokens, {rows} × {context}", _Step(rows, _TREE_TOKENS, context, tree=True))
    for rows in batches[1:]:
        for prefix in (*_SHORT_PREFIXES, *contexts):
            yield prefix_case(rows, prefix)


def prefix_case(rows: int, prefix: int, stored: torch.dtype = torch.bfloat16) -> Case:
    """Return the case of decoding branches of a shared prefix, read once or by each for itself."""
    of_type = "" if stored == torch.bfloat16 else f", {_type_name(stored)}"
    step = _Step(rows, 1, prefix + _OWN_TOKENS, stored, prefix=prefix)
    return _case(f"{rows} branches of a prefix of {prefix}{of_type}", step)


def bytes_per_token(stored: torch.dtype) -> int:
    """Return the bytes of one token's keys and values."""
    if stored == INT4:
        vector = _DIM // 2 + 2 * _DIM // GROUP
    else:
        vector = _DIM * stored.itemsize + (4 if stored in QUANTIZED else 0)
    return 2 * _KV_HEADS * vector


def _type_name(stored: torch.dtype) -> str:
    return "int4" if stored == INT4 else str(stored).removeprefix("torch.")


def _case(name: str, step: _Step) -> Case:
    keys = step.prefix + step.rows * (step.context - step.prefix)
    moved = keys * bytes_per_token(step.stored) + 2 * step.rows * step.queries * _HEADS * _DIM * 2
    seen = int(_seen(step).sum()) if step.queries > 1 else 0
    return Case(name, moved, partial(_runs, step=step), 4.0 * step.rows * seen * _HEADS * _DIM)


def _runs(device: torch.device, step: _Step) -> Runs:
    pages = _pages(step)
    count = int(pages.max()) + 1
    numbers = torch.randn(2, _KV_HEADS, count, _PAGE, _DIM, device=device, dtype=torch.bfloat16)
    q = torch.randn(step.rows * step.queries, _HEADS, _DIM, device=device, dtype=torch.bfloat16)
    if step.stored in QUANTIZED:
        stored, scales = quantize_vectors(numbers, step.stored)
        cache = PagedKeys(*stored, *scales)
        numbers = dequantize_vectors(stored, scales).bfloat16()
    else:
        cache = PagedKeys(*numbers)
    work = _work(device, step, pages, together=step.prefix > 0)
    if step.prefix:
        apart = _work(device, step, pages, together=False)
        peers: dict[str, Run] = {"each for itself": lambda: paged_attention(q, cache, apart, scale=_SCALE)}
        expected = peers["each for itself"]
    else:
        peers, expected = _torch(device, step, q, numbers, pages)
    return Runs(lambda: paged_attention(q, cache, work, scale=_SCALE), peers, expected, 0.02)


def _torch(device: torch.device, step: _Step, q: Tensor, numbers: Tensor, pages: Ints) -> tuple[dict[str, Run], Run]:
    """Return torch's attention to the same keys, ``[rows, heads, keys, dim]``, and that in float32."""
    index = torch.from_numpy(pages).to(device)
    k, v = (x[:, index].transpose(0, 1).flatten(2, 3)[:, :, : step.context].contiguous() for x in numbers)
    own = q.view(step.rows, step.queries, _HEADS, _DIM).transpose(1, 2).contiguous()
    mask = None if step.queries == 1 else torch.from_numpy(_seen(step)).to(device)
    # Torch's fastest kernel takes no mask, except this one by name.
    named = None if step.tree or mask is None else causal_lower_right(step.queries, step.context)

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=_SCALE, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    peers: dict[str, Run] = {"SDPA": lambda: dense(own, k, v, mask if named is None else named)}
    if device.type == "cuda" and mask is not None:  # its compilations take longer than all else here
        fast, blocks = compiled(_flex, device), _blocks(step, mask)
        peers["FlexAttention"] = lambda: fast(own, k, v, blocks).transpose(1, 2).flatten(0, 1)
    return peers, lambda: dense(own.float(), k.float(), v.float(), mask)


def _flex(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask) -> Tensor:
    out: Tensor = flex_attention(q, k, v, block_mask=blocks, scale=_SCALE, enable_gqa=True)
    return out


def _blocks(step: _Step, mask: Tensor) -> BlockMask:
    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[query, key]

    return create_block_mask(seen, None, None, step.queries, step.context, device=str(mask.device))


def _seen(step: _Step) -> npt.NDArray[np.bool_]:
    """Return the mask of the keys that each query sees, ``[queries, context]``."""
    before = step.context - step.queries
    own = _tree() if step.tree else np.tri(step.queries, dtype=np.bool_)
    return np.concatenate((np.ones((step.queries, before), np.bool_), own), axis=1)


def _tree() -> npt.NDArray[np.bool_]:
    sees = np.eye(_TREE_TOKENS, dtype=np.bool_)
    for token in range(1, _TREE_TOKENS):
        sees[token] |= sees[(token - 1) // 2]
    return sees


def _pages(step: _Step) -> Ints:
    """Return a page table ``[rows, pages]``, in random order."""
    shared, own = step.prefix // _PAGE, -(-(step.context - step.prefix) // _PAGE)
    order = np.random.default_rng(0).permutation(shared + step.rows * own)
    common = np.broadcast_to(order[:shared], (step.rows, shared))
    return np.concatenate((common, order[shared:].reshape(step.rows, own)), axis=1)


def _work(device: torch.device, step: _Step, pages: Ints, *, together: bool) -> AttentionTiles:
    """Plan the tiles; ``together``: the shared prefix is read once for all rows."""
    rows, tokens = np.arange(step.rows), np.arange(step.rows * step.queries)
    before, ones = step.context - step.queries, np.ones(step.rows, np.int64)
    depth = _tree().sum(axis=1) - 1 if step.tree else np.arange(step.queries)
    segments = Segments(
        rows=rows,
        counts=ones * step.queries,
        tokens=tokens,
        begins=ones * step.prefix * together,
        ends=ones * step.context,
        trees=ones * (before if step.tree else NO_TREE),
        starts=rows * step.queries,
    )
    if together:
        segments = concat_segments([segments, shared_prefix_segment(0, tokens, 0, step.prefix)])
    plan = plan_tiles(
        segments,
        pages,
        np.tile(before + depth, step.rows),
        tokens,
        heads_per_kv=_HEADS // _KV_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=_DIM,
        programs=count_busy_programs(device),
        sees=np.tile(pack_bits(_tree(), 1), (step.rows, 1)) if step.tree else None,
    )
    return TileBuffers(TileShape.of(plan, rounded=False), device).fill(plan)
