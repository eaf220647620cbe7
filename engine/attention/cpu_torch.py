"""Paged attention in plain torch operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.attention.layer import LayerAttention
from engine.attention.paged_tensors import gather, write
from engine.attention.plan import Group, Keys, Rows, plan_step
from engine.attention.projections import turned
from kernels.attention.reference import attention, attention_piece, causal_attention, merge
from kernels.quantize import dequantize_vectors

_BLOCK_FLOATS = 1 << 20
"""Gathered keys of this many float32 (4 MiB, and as many values) are attended to while they are in the cache."""


class TorchAttention:
    """``LayerAttend`` on the CPU, where no kernel can be compiled."""

    def __init__(self, layers: Sequence[LayerAttention], kv: Tensor, scales: Tensor | None = None) -> None:
        """``kv``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values. With 8-bit ``kv``,
        ``scales``: ``[layers, 2, kv_heads, pages, page_size]`` float32."""
        self._layers = layers
        self._kv = list(kv)
        self._scales: list[Tensor | None] = [None] * len(kv) if scales is None else list(scales)
        self._workspaces = Workspace(), Workspace()

    def prepare(self, rows: Rows) -> None:
        """Plans a step."""
        self._plan = plan_step(rows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Attend``."""
        plan, about = self._plan, self._layers[layer]
        k, v = write(self._kv[layer], self._scales[layer], plan.slots, k, v)
        groups, causal, pieces = plan.groups, plan.causal, plan.pieces
        if about.window is not None or about.softcap is not None:
            groups, causal, pieces = plan.masked(about.window), [], []
        if not pieces and not causal and _in_order(groups):
            return self._group(groups[0], layer, q).flatten(1)
        if not pieces:
            out = q.new_empty(q.shape)
            for own in causal:
                out[own] = self._causal(layer, q[own], k[own], v[own])[0]
            for group in groups:
                out[group.tokens] = self._group(group, layer, q)
            return out.flatten(1)
        out, total = self._own_pieces(groups, causal, layer, q, k, v)
        for piece in pieces:
            mixed, sums = self._piece(piece.keys, layer, q[piece.queries])
            merged = merge(out[piece.queries], total[piece.queries], mixed, sums)
            if len(pieces) == 1 and piece.queries == slice(0, len(q)):
                return merged[0].flatten(1)
            out[piece.queries], total[piece.queries] = merged
        return out.flatten(1)

    def projected(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``LayerAttend``."""
        return self(layer, *turned(self._layers[layer], qkv, norm, eps, cos, sin))

    def _own_pieces(
        self, groups: Sequence[Group], causal: Sequence[slice], layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What each token sees that is not shared, with the log-sum-exps: ``[tokens, heads, …]``."""
        if not causal and _in_order(groups):
            return self._group_piece(groups[0], layer, q)
        out, total = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        for own in causal:
            out[own], total[own] = self._causal(layer, q[own], k[own], v[own])
        for group in groups:
            out[group.tokens], total[group.tokens] = self._group_piece(group, layer, q)
        return out, total

    def _causal(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        about = self._layers[layer]
        mixed, sums = causal_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale=about.scale)
        return mixed.transpose(0, 1), sums.transpose(0, 1)

    def _piece(self, keys: Keys, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of ``q`` ``[queries, heads, head_dim]`` to all of one row's keys."""
        about = self._layers[layer]
        k, v = (self._read(keys, layer, kind) for kind in (0, 1))
        # The queries that share a key-value head become its rows, so its keys are read once.
        own = q.view(len(q), about.kv_heads, -1, about.head_dim).transpose(0, 1).flatten(1, 2)
        mixed, sums = attention_piece(own[None], k, v, scale=about.scale)
        mixed = mixed.view(about.kv_heads, len(q), -1, about.head_dim).transpose(0, 1)
        return mixed.flatten(1, 2), sums.view(about.kv_heads, len(q), -1).transpose(0, 1).flatten(1)

    def _group(self, group: Group, layer: int, q: Tensor) -> Tensor:
        """Attention of each row's queries to the row's keys: ``[tokens, heads, head_dim]``."""
        about = self._layers[layer]
        parts = [
            attention(own, k, v, scale=about.scale, mask=mask, softcap=about.softcap)
            for own, k, v, mask in self._blocks(group, layer, q)
        ]
        return self._tokens(group, about, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _group_piece(self, group: Group, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """The same with the log-sum-exps, ``[tokens, heads]``."""
        about = self._layers[layer]
        parts = [
            attention_piece(own, k, v, scale=about.scale, mask=mask)
            for own, k, v, mask in self._blocks(group, layer, q)
        ]
        mixed, sums = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return self._tokens(group, about, mixed), self._tokens(group, about, sums[..., None]).squeeze(-1)

    def _blocks(self, group: Group, layer: int, q: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Queries, keys, values and mask of as many rows as fit into the processor's cache together."""
        about, rows, wide = self._layers[layer], group.rows, group.wide
        own = q[group.queries].view(rows, wide, about.kv_heads, -1, about.head_dim)
        own = own.permute(0, 2, 3, 1, 4).flatten(2, 3)
        block = max(1, _BLOCK_FLOATS // (group.keys.tokens * about.kv_heads * about.head_dim))
        if block >= rows:
            k, v = (self._read(group.keys, layer, kind) for kind in (0, 1))
            yield own, k, v, group.mask
            return
        for first in range(0, rows, block):
            some = slice(first, min(first + block, rows))
            k, v = (self._read(group.keys, layer, kind, some) for kind in (0, 1))
            yield own[some], k, v, None if group.mask is None else group.mask[some]

    def _tokens(self, group: Group, about: LayerAttention, x: Tensor) -> Tensor:
        """``[rows, kv_heads, heads_per_kv * wide, n]`` as ``[tokens, heads, n]``, without the padded queries."""
        if group.wide > 1:
            x = x.view(group.rows, about.kv_heads, -1, group.wide, x.shape[-1]).permute(0, 3, 1, 2, 4)
        x = x.reshape(group.rows * group.wide, about.heads, x.shape[-1])
        return x if group.kept is None else x[group.kept]

    def _read(self, keys: Keys, layer: int, kind: int, rows: slice | None = None) -> Tensor:
        """Keys (``kind`` 0) or values (1) of some rows: ``[rows, kv_heads, tokens, head_dim]``."""
        about, pool, factors = self._layers[layer], self._kv[layer][kind], self._scales[layer]
        scales = None if factors is None else factors[kind]
        if keys.first_slot is not None:
            span = slice(keys.first_slot, keys.first_slot + keys.tokens)
            in_place: Tensor = pool.flatten(1, 2)[None, :, span]
            return in_place if scales is None else dequantize_vectors(in_place, scales.flatten(1, 2)[None, :, span])
        assert keys.chunks is not None
        chunks = keys.chunks if rows is None else keys.chunks[rows]
        buffer = self._workspaces[kind].take(chunks.numel(), pool.shape[2] * about.head_dim)
        gather(pool, scales, chunks.view(-1), buffer)
        gathered: Tensor = buffer.view(len(chunks), about.kv_heads, -1, about.head_dim)
        return gathered[:, :, : keys.tokens]


def _in_order(groups: Sequence[Group]) -> bool:
    """Whether the groups are one, of all tokens in the batch's order."""
    return len(groups) == 1 and isinstance(groups[0].tokens, slice)


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
