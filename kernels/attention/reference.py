"""Attention over pieces of a context and the merge of the pieces in plain torch: the reference of all other backends.

Softmax attention over a set of keys can be cut into disjoint pieces: each gives a weighted mean of values and the
log-sum-exp of its scores, and the result is the mean of these, weighted by the pieces' shares of the total (Dao et al.
2022, https://arxiv.org/abs/2205.14135, section 3.1). So a prefix that many branches share is attended to once for all
of them (Juravsky et al. 2024, "Hydragen", https://arxiv.org/abs/2402.05099).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_QUERIES = 8
"""With more queries torch's tiled attention is faster than one small product for each head."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """Return the first result of ``attention_piece``, at less cost: for a context in one piece.

    Every query must see some key, no matter which. With ``softcap`` c the scores become ``c * tanh(score / c)``.
    """
    if q.shape[2] > _MAX_QUERIES and softcap is None:
        return _tiled(q, k, v, scale, mask)[0]
    weights = torch.softmax(_scores(q, k, scale, mask, softcap), dim=-1)
    return torch.bmm(_flat(weights), _flat(v)).view(q.shape)


def attention_piece(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the softmax attention to a piece of a context, and the log-sum-exp of its scores.

    ``q``: ``[rows, heads, queries, dim]``, ``k`` and ``v``: ``[rows, heads, keys, dim]``, float32. ``mask``: float32,
    broadcastable to ``[rows, heads, queries, keys]``, added to the scores; every query must see the first key.
    Returns ``[rows, heads, queries, dim]`` and ``[rows, heads, queries]``.
    """
    if q.shape[2] > _MAX_QUERIES:
        return _tiled(q, k, v, scale, mask)
    scores = _scores(q, k, scale, mask, None)
    weights = torch.log_softmax(scores, dim=-1)
    total = scores[..., 0] - weights[..., 0]
    return torch.bmm(_flat(weights.exp_()), _flat(v)).view(q.shape), total


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Return the results of ``attention_piece`` for one sequence whose query ``i`` sees the keys ``0 … i``.

    ``q``: ``[heads, queries, dim]``, ``k`` and ``v``: ``[kv_heads, queries, dim]``. Returns ``[heads, queries, dim]``
    and ``[heads, queries]``.
    """
    repeats = len(q) // len(k)
    k, v = k.repeat_interleave(repeats, dim=0), v.repeat_interleave(repeats, dim=0)
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k[None], v[None], 0.0, True, scale=scale
    )
    return out[0], total[0]


def merge(out: Tensor, total: Tensor, other: Tensor, other_total: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the attention over two disjoint sets of keys.

    ``out`` and ``other``: ``[..., dim]``, ``total`` and ``other_total``: ``[...]`` log-sum-exps. Returns both for the
    union, exact up to rounding.
    """
    share = torch.sigmoid(other_total - total)
    return torch.lerp(out, other, share[..., None]), torch.logaddexp(total, other_total)


def _scores(q: Tensor, k: Tensor, scale: float, mask: Tensor | None, softcap: float | None) -> Tensor:
    scores = torch.bmm(_flat(q * scale), _flat(k).transpose(1, 2)).view(*q.shape[:3], k.shape[2])
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return scores if mask is None else scores.add_(mask)


def _tiled(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, total = flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out, total


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-2], x.shape[-1])
