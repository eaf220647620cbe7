"""Attention of one sequence without a cache, for calibration and for the self-test of transformers' models."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from kernels.attention.reference import attention


def attend_densely(layer: LayerAttentionConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention ``[queries, heads * head_dim]`` of a sequence's last queries to all its keys.

    ``q``: ``[queries, heads, head_dim]``. ``k`` and ``v``: ``[keys, kv_heads, head_dim]``.
    """
    positions, keys = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    is_hidden = (keys > positions) | (keys <= positions - (layer.window or len(k)))
    if layer.chunk is not None:
        is_hidden |= keys < positions // layer.chunk * layer.chunk
    mask = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)
    k, v = (x.repeat_interleave(layer.heads // layer.kv_heads, dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    sinks = None if layer.sinks is None else layer.sinks[:, None].expand(-1, q.shape[2])
    out = attention(q, k, v, scale=layer.scale, mask=mask, softcap=layer.softcap, sinks=sinks)
    return out[0].transpose(0, 1).flatten(1)
