"""Attention to keys and values in pages: Triton on a GPU, and plain torch, its reference.

One kernel serves decoding with split keys, chunks of a prompt after a cached beginning, prefixes that many sequences
share, and trees of draft tokens: they differ in their tiles alone (``kernels.common.attention_schedule``). A tile's
queries attend to its keys with an online softmax (Dao et al. 2022, https://arxiv.org/abs/2205.14135), and a second
kernel merges the partial results of each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.attention_schedule import BEGIN, COUNT, END, FIRST, NO_TREE, ROW, START, TREE, AttentionTiles
from kernels.common.paged_keys import PagedKeys
from kernels.quantize import dequantize_vectors


def paged_attention(
    q: Tensor,
    cache: PagedKeys,
    tiles: AttentionTiles,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    merges_in_order: bool = False,
) -> Tensor:
    """Return the attention of a step's tokens to the keys that each may see: ``[tokens, heads, head_dim]``.

    ``q``: ``[tokens, heads, head_dim]``; its last axis has stride 1. Scores are multiplied by ``scale``; with
    ``softcap`` c they become ``c * tanh(score / c)``. ``window`` must be what the tiles were planned with. ``sinks``:
    float32 ``[heads]``, one more score of each query of a head, without a value. Tokens that are in no tile are
    undefined. ``merges_in_order``: merge a token's partial results one by one, in the order of their keys, as a
    batch-invariant plan needs.
    """
    if q.is_cuda:
        from kernels.triton.paged_attention import launch

        return launch(
            q,
            cache,
            tiles,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            merges_in_order=merges_in_order,
        )
    return reference(q, cache, tiles, scale=scale, window=window, softcap=softcap, sinks=sinks)


def reference(
    q: Tensor,
    cache: PagedKeys,
    tiles: AttentionTiles,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``paged_attention`` in torch, tile by tile."""
    out = torch.zeros(q.shape, device=q.device)
    first = torch.full(q.shape[1:2], -torch.inf, device=q.device) if sinks is None else sinks
    total = first.repeat(len(q), 1)
    keys = _to_float(cache.keys, cache.key_scales)
    values = keys if cache.is_latent else _to_float(cache.values, cache.value_scales)
    heads_per_kv = q.shape[1] // len(keys)
    for tile in torch.cat((tiles.low, tiles.high)).tolist():
        if not tile[COUNT]:
            continue
        tokens = tiles.tokens[tile[FIRST] : tile[FIRST] + tile[COUNT]].long()
        key = torch.arange(tile[BEGIN], tile[END], device=q.device)
        page, offset = tiles.pages[tile[ROW]].long()[key // keys.shape[2]], key % keys.shape[2]
        k, v = (x[:, page, offset].repeat_interleave(heads_per_kv, dim=0) for x in (keys, values))
        scores = torch.einsum("thd,hkd->thk", q[tokens].float(), k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~_find_visible(tiles, tile, tokens, key, window)[:, None], -torch.inf)
        tile_total = scores.logsumexp(dim=-1)
        mixed = torch.einsum("thk,hkd->thd", (scores - tile_total[..., None]).exp().nan_to_num(0), v)
        union = torch.logaddexp(total[tokens], tile_total)
        old, new = ((part - union).exp().nan_to_num(0)[..., None] for part in (total[tokens], tile_total))
        out[tokens], total[tokens] = out[tokens] * old + mixed * new, union
    return out.to(q.dtype)


def _to_float(x: Tensor, scales: Tensor | None) -> Tensor:
    return x.float() if scales is None else dequantize_vectors(x, scales)


def _find_visible(tiles: AttentionTiles, tile: list[int], tokens: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Return which keys each query sees, bool ``[queries, keys]``."""
    query = tiles.positions[tokens][:, None]
    tree_index = key - tile[TREE]
    tree_token = (tile[START] + tree_index).clamp(0, len(tiles.positions) - 1)
    position = torch.where(tree_index < 0, key, tiles.positions[tree_token])
    visible = key <= query
    if tile[TREE] != NO_TREE:
        assert tiles.sees is not None
        bit = tree_index.clamp_min(0)
        bits = tiles.sees[tokens][:, bit // 32] >> (bit % 32).int() & 1
        visible = torch.where(tree_index < 0, visible, bits.bool())
    return visible if window is None else visible & (position > query - window)
