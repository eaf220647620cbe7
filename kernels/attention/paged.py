"""Attention to keys and values in pages: Triton on CUDA, and plain torch, its reference.

One kernel serves decoding with split keys, chunks of a prompt behind a cached beginning, prefixes that many sequences
share and trees of guesses: they differ in their tiles alone (``kernels.common.attention_schedule``). A tile's queries
attend to its keys, with an online softmax (Dao et al. 2022, https://arxiv.org/abs/2205.14135), and a second kernel
merges what the tiles of one token found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.attention_schedule import BEGIN, COUNT, END, FIRST, NO_TREE, ROW, START, TREE, Work
from kernels.common.paged_keys import PagedKeys
from kernels.quantize import dequantize_vectors


def paged_attention(
    q: Tensor, cache: PagedKeys, work: Work, *, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Attention of a step's tokens to what each may see: ``[tokens, heads, head_dim]``, of ``q``'s type.

    ``q``: ``[tokens, heads, head_dim]``; its last axis has stride 1. Scores are multiplied with ``scale``; with
    ``softcap`` c they become ``c * tanh(score / c)``. ``window`` must be what the work was planned with. Tokens that no
    tile has stay undefined.
    """
    if q.is_cuda:
        from kernels.triton.paged_attention import launch

        return launch(q, cache, work, scale=scale, window=window, softcap=softcap)
    return reference(q, cache, work, scale=scale, window=window, softcap=softcap)


def reference(
    q: Tensor, cache: PagedKeys, work: Work, *, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """The same, tile by tile."""
    out = torch.zeros(q.shape, device=q.device)
    total = torch.full(q.shape[:2], -torch.inf, device=q.device)
    keys, values = _floats(cache.keys, cache.key_scales), _floats(cache.values, cache.value_scales)
    per_kv = q.shape[1] // len(keys)
    for tile in torch.cat((work.low, work.high)).tolist():
        if not tile[COUNT]:
            continue
        tokens = work.tokens[tile[FIRST] : tile[FIRST] + tile[COUNT]].long()
        key = torch.arange(tile[BEGIN], tile[END], device=q.device)
        page, slot = work.pages[tile[ROW]].long()[key // keys.shape[2]], key % keys.shape[2]
        k, v = (x[:, page, slot].repeat_interleave(per_kv, dim=0) for x in (keys, values))
        scores = torch.einsum("thd,hkd->thk", q[tokens].float(), k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~_visible(work, tile, tokens, key, window)[:, None], -torch.inf)
        sums = scores.logsumexp(dim=-1)
        mixed = torch.einsum("thk,hkd->thd", (scores - sums[..., None]).exp().nan_to_num(0), v)
        union = torch.logaddexp(total[tokens], sums)
        old, new = ((part - union).exp().nan_to_num(0)[..., None] for part in (total[tokens], sums))
        out[tokens], total[tokens] = out[tokens] * old + mixed * new, union
    return out.to(q.dtype)


def _floats(x: Tensor, scales: Tensor | None) -> Tensor:
    return x.float() if scales is None else dequantize_vectors(x, scales)


def _visible(work: Work, tile: list[int], tokens: Tensor, key: Tensor, window: int | None) -> Tensor:
    """``[queries, keys]``."""
    query = work.positions[tokens][:, None]
    behind = key - tile[TREE]
    position = torch.where(behind < 0, key, work.positions[(tile[START] + behind).clamp(0, len(work.positions) - 1)])
    visible = key <= query
    if tile[TREE] != NO_TREE:
        assert work.sees is not None
        word = behind.clamp_min(0)
        bits = work.sees[tokens][:, word // 32] >> (word % 32).int() & 1
        visible = torch.where(behind < 0, visible, bits.bool())
    return visible if window is None else visible & (position > query - window)
