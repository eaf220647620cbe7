"""Attention of the rows of a draft level to keys and values in pages, with lengths that only the device knows.

``paged_attention`` cuts a step into tiles on the host, which would have to wait for each level's tree. Here each branch
has equally many rows and a fixed number of parts of its keys, so one CUDA graph serves all levels and steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.draft_keys import DraftKeys
from kernels.quantize import dequantize_vectors


def draft_attention(
    q: Tensor,
    own: DraftKeys,
    drafts: DraftKeys | None,
    merged: Tensor,
    partials: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention ``[rows, heads, head_dim]`` of rows to their branches' own keys and those of draft tokens.

    ``q``: ``[rows, heads, head_dim]``; its last axis has stride 1. ``merged`` and ``partials``: ``merge_table`` for as
    many parts as the own keys are cut into, and one more if there are ``drafts``. ``scale``, ``window``,
    ``softcap`` and ``sinks`` are those of ``paged_attention``; the window is that of the own keys. A row that sees no
    key is undefined.
    """
    if q.is_cuda:
        from kernels.triton import draft_attention as on_gpu

        return on_gpu.draft_attention(
            q, own, drafts, merged, partials, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    scores, values = _compute_scores(q, own, scale, window, softcap)
    if drafts is not None:
        draft_scores, draft_values = _compute_scores(q, drafts, scale, None, softcap)
        scores, values = torch.cat((scores, draft_scores), dim=-1), torch.cat((values, draft_values), dim=2)
    if sinks is not None:
        column = sinks.view(values.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., : values.shape[2]]
    mixed = torch.einsum("bkgqn,bknd->bqkgd", weights, values)
    return mixed.reshape(q.shape).to(q.dtype)


def merge_table(rows: int, parts: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the ``merged`` and ``partials`` (``AttentionTiles``) of rows whose keys all have as many parts."""
    row = torch.arange(rows, dtype=torch.int32, device=device)
    merged = torch.stack((row, row * parts, torch.full_like(row, parts)), dim=1)
    return merged, (row[:, None] + rows * torch.arange(parts, dtype=torch.int32, device=device)).flatten()


def _compute_scores(
    q: Tensor, part: DraftKeys, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the scores ``[branches, kv_heads, group, queries, keys]``, minus infinity for keys that are not seen, and
    the values ``[branches, kv_heads, keys, head_dim]``, 0 after the last."""
    cache, branches = part.cache, len(part.ends)
    kv_heads, _, page, _ = cache.keys.shape
    key = torch.arange(part.pages.shape[1] * page, device=q.device)
    exists = key < part.ends[:, None]

    def read(numbers: Tensor, scales: Tensor | None) -> Tensor:
        whole = numbers.float() if scales is None else dequantize_vectors(numbers, scales)
        found = whole[:, torch.where(exists[:, ::page], part.pages, 0).long()].flatten(2, 3).transpose(0, 1)
        return torch.where(exists[:, None, :, None], found, 0)

    keys = read(cache.keys, cache.key_scales)
    values = keys if cache.is_latent else read(cache.values, cache.value_scales)
    queries = q.float().view(branches, -1, kv_heads, q.shape[1] // kv_heads, q.shape[2])
    scores = torch.einsum("bqkgd,bknd->bkgqn", queries, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    positions = part.positions.view(branches, -1, 1)
    if part.sees is None:
        seen = key <= positions
        seen &= key > positions - window if window is not None else True
    else:
        words = part.sees.view(branches, -1, part.sees.shape[1])
        known = key.clamp_max(32 * words.shape[2] - 1)
        seen = (words[:, :, known // 32] >> (known % 32).int() & 1).bool() & (key < 32 * words.shape[2])
    seen = seen & exists[:, None]
    return scores.masked_fill(~seen[:, None, None], -torch.inf), values
