"""Paged attention in plain torch operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import LayerAttention
from engine.attention.plan import Group, Keys, StepPlan
from kernels.attention import attention, causal_attention, merge

_BLOCK_FLOATS = 1 << 20
"""Gathered keys of this many float32 (4 MiB, and as many values) are attended to while they are in the cache."""


class TorchAttention:
    """``Attend`` on the CPU. ``plan`` is set before each step."""

    plan: StepPlan

    def __init__(self, layers: Sequence[LayerAttention], kv: Tensor) -> None:
        """``kv``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values."""
        self._layers = layers
        self._pools = [(keys, values) for keys, values in kv]
        self._workspaces = Workspace(), Workspace()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Attend``."""
        plan, about = self.plan, self._layers[layer]
        for pool, new in zip(self._pools[layer], (k, v), strict=True):
            pool.view(-1, about.head_dim).index_copy_(0, plan.slots, new.reshape(-1, about.head_dim))
        tokens = len(q)
        groups, causal, pieces = plan.groups, plan.causal, plan.pieces
        if about.window is not None or about.softcap is not None:
            groups, causal, pieces = plan.masked(about.window), [], []
        if not (causal or pieces) and len(groups) == 1 and isinstance(groups[0].queries, slice):
            return self._group(groups[0], layer, q)[0].reshape(tokens, -1)
        out = q.new_empty(tokens, about.heads, about.head_dim)
        total = q.new_empty(tokens, about.heads)
        for own in causal:
            mixed, sums = causal_attention(
                q[own].transpose(0, 1), k[own].transpose(0, 1), v[own].transpose(0, 1), scale=about.scale
            )
            out[own], total[own] = mixed.transpose(0, 1), sums.transpose(0, 1)
        for group in groups:
            mixed, sums = self._group(group, layer, q)
            if group.kept is not None:
                mixed, sums = mixed[group.kept], sums[group.kept]
            out[group.tokens], total[group.tokens] = mixed, sums
        for piece in pieces:
            mixed, sums = self._piece(piece.keys, layer, q[piece.queries])
            merged = merge(out[piece.queries], total[piece.queries], mixed, sums)
            out[piece.queries], total[piece.queries] = merged
        return out.view(tokens, -1)

    def _piece(self, keys: Keys, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of ``q`` ``[queries, heads, head_dim]`` to all of one row's keys."""
        about = self._layers[layer]
        k, v = (self._read(keys, layer, kind) for kind in (0, 1))
        per_kv = about.heads // about.kv_heads
        # The queries that share a key-value head become its rows, so its keys are read once.
        own = q.view(len(q), about.kv_heads, per_kv, about.head_dim).permute(1, 0, 2, 3).flatten(1, 2)
        mixed, sums = attention(own[None], k, v, scale=about.scale, softcap=about.softcap)
        mixed = mixed.view(about.kv_heads, len(q), per_kv, -1).transpose(0, 1).flatten(1, 2)
        return mixed, sums.view(about.kv_heads, len(q), per_kv).transpose(0, 1).flatten(1)

    def _group(self, group: Group, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of each row's queries to the row's keys: ``[rows * wide, heads, …]``."""
        about, rows, wide = self._layers[layer], group.rows, group.wide
        per_kv = about.heads // about.kv_heads
        own = q[group.queries].reshape(rows, wide, about.kv_heads, per_kv, about.head_dim)
        own = own.permute(0, 2, 3, 1, 4).flatten(2, 3)
        width = group.keys.tokens * about.kv_heads * about.head_dim
        block = max(1, _BLOCK_FLOATS // width)
        parts = []
        for first in range(0, rows, block):
            some = slice(first, min(first + block, rows))
            k, v = (self._read(group.keys, layer, kind, some) for kind in (0, 1))
            parts.append(attention(own[some], k, v, scale=about.scale, mask=group.mask[some], softcap=about.softcap))
        mixed, sums = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        mixed = mixed.view(rows, about.kv_heads, per_kv, wide, about.head_dim).permute(0, 3, 1, 2, 4)
        sums = sums.view(rows, about.kv_heads, per_kv, wide).permute(0, 3, 1, 2)
        return mixed.reshape(rows * wide, about.heads, about.head_dim), sums.reshape(rows * wide, about.heads)

    def _read(self, keys: Keys, layer: int, kind: int, rows: slice = slice(0, 1)) -> Tensor:
        """Keys (``kind`` 0) or values (1) of some rows: ``[rows, kv_heads, tokens, head_dim]``."""
        about, pool = self._layers[layer], self._pools[layer][kind]
        if keys.first_slot is not None:
            in_place: Tensor = pool.flatten(1, 2)[None, :, keys.first_slot : keys.first_slot + keys.tokens]
            return in_place
        assert keys.chunks is not None
        each = len(keys.chunks) // keys.rows
        chunks = keys.chunks[rows.start * each : rows.stop * each]
        buffer = self._workspaces[kind].take(len(chunks), pool.shape[2] * about.head_dim)
        torch.index_select(pool.view(-1, buffer.shape[1]), 0, chunks, out=buffer)
        gathered: Tensor = buffer.view(rows.stop - rows.start, about.kv_heads, -1, about.head_dim)
        return gathered[:, :, : keys.tokens]


class Workspace:
    """One growing buffer for gathered pages: asking the allocator for megabytes at every layer costs more than the
    gather."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, rows: int, columns: int) -> Tensor:
        """An uninitialised ``[rows, columns]`` view, valid until the next call."""
        if self._buffer.numel() < rows * columns:
            self._buffer = torch.empty(rows * columns)
        return self._buffer[: rows * columns].view(rows, columns)
