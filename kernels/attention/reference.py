"""Attention over gathered keys and values in plain torch, for backends without a compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_QUERIES = 8
"""With more queries torch's tiled attention is faster than one small product for each head."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the softmax attention of queries ``[rows, heads, queries, dim]``, in the same shape.

    ``k`` and ``v``: ``[rows, heads, keys, dim]``, float32. ``mask``: float32, broadcastable to ``[rows, heads, queries,
    keys]``, added to the scores; every query must see some key. With ``softcap`` c the scores become ``c * tanh(score /
    c)``. ``sinks``: ``[heads, queries]``, one more score of each query, without a value.
    """
    if q.shape[2] > _MAX_QUERIES and softcap is None and sinks is None:
        if mask is not None:
            mask = mask.expand(*q.shape[:3], k.shape[2])
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: Tensor = flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)[0]
        return out
    scores = torch.bmm(_flatten(q * scale), _flatten(k).transpose(1, 2)).view(*q.shape[:3], k.shape[2])
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores if mask is None else scores.add_(mask)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, ..., None].expand(len(scores), -1, -1, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return torch.bmm(_flatten(weights), _flatten(v)).view(q.shape)


def _flatten(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-2], x.shape[-1])
