"""Paged attention in plain torch operators, one row after the other, for heads that no kernel is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.attention.paged_tensors import gather_pages, write_kv
from engine.attention.plan import AttentionMetadata, kv_slots
from kernels.attention.reference import attention
from kernels.common.rotary import rotary
from kernels.layers.norm import rms_norm

_CHUNK = 256
"""Queries of one row that attend at once. It bounds the memory of masks and scores."""


class TorchAttention:
    """A ``FusedAttentionBackend`` for the CPU that supports heads of any size.

    The shape of a matrix product decides in which order it adds. If ``deterministic``, each token attends by products
    of its own, whose shapes depend on its position alone: its result is, bit for bit, a function of its sequence.
    """

    def __init__(
        self,
        layers: Sequence[LayerAttentionConfig],
        kv: Tensor,
        scales: Tensor | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        """``kv``: ``[layers, kinds, kv_heads, pages, page_size, head_dim]``, keys before values. For quantized
        ``kv`` with ``scales`` see ``KeyPool``. ``deterministic`` steps have no trees."""
        self._layers, self._kv, self._deterministic = layers, list(kv), deterministic
        self._shape = kv.shape
        self._scales: list[Tensor | None] = [None] * len(kv) if scales is None else list(scales)

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = _split_into_tokens(metadata) if self._deterministic else metadata
        _, num_kinds, kv_heads, pages, page_size, _ = self._shape
        self._kv_slots = torch.from_numpy(kv_slots(metadata.slots, pages * page_size, num_kinds * kv_heads))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        vectors = k if self._layers[layer].is_latent else torch.cat((k, v), dim=1)
        if vectors.shape[1]:
            write_kv(self._kv[layer], self._scales[layer], self._kv_slots, vectors)
        out, start = torch.empty(q.shape), 0
        for row, query_len in enumerate(self._metadata.query_lens.tolist()):
            tokens = slice(start, start + query_len)
            out[tokens] = self._attend_row(layer, row, q[tokens], tokens)
            start += query_len
        return out.flatten(1)

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        return self(layer, *normalize_and_rotate(self._layers[layer], qkv, norm=norm, eps=eps, cos=cos, sin=sin))

    def _attend_row(self, layer: int, row: int, q: Tensor, tokens: slice) -> Tensor:  # noqa: ARG002
        """Return the attention of one row's queries ``[queries, heads, head_dim]``, in the same shape. ``tokens``: the
        queries among those of the step."""
        config, num_queries, page_size = self._layers[layer], len(q), self._metadata.page_size
        seq_len = int(self._metadata.seq_lens[row])
        first = config.span.first_key(seq_len - num_queries) // page_size
        k = self._read(layer, 0, row=row, first_page=first, seq_len=seq_len)
        v = k if config.is_latent else self._read(layer, 1, row=row, first_page=first, seq_len=seq_len)
        mask = self._mask(layer, row, k, first * page_size)
        sinks = None if config.sinks is None else config.sinks.view(config.kv_heads, -1)
        chunks = []
        for start in range(0, num_queries, _CHUNK):
            chunk = q[start : start + _CHUNK]
            # The query heads that share a key-value head become its rows, so that its keys are read once.
            grouped = chunk.view(len(chunk), config.kv_heads, -1, config.head_dim).permute(1, 2, 0, 3)
            grouped_mask = mask[start : start + _CHUNK].repeat(grouped.shape[1], 1)
            attended = attention(
                grouped.flatten(1, 2)[None],
                k,
                v,
                scale=config.scale,
                mask=grouped_mask,
                softcap=config.softcap,
                sinks=None if sinks is None else sinks.repeat_interleave(len(chunk), dim=1),
            )
            chunks.append(attended.view(grouped.shape).permute(2, 0, 1, 3).flatten(1, 2))
        return torch.cat(chunks)

    def _read(self, layer: int, kind: int, row: int, first_page: int, seq_len: int) -> Tensor:
        """Return a row's keys (``kind`` 0) or values (1) from ``first_page`` on: ``[1, kv_heads, keys, head_dim]``."""
        pool, scales, metadata = self._kv[layer][kind], self._scales[layer], self._metadata
        columns = slice(first_page, -(-seq_len // metadata.page_size))
        head_offsets = metadata.num_pool_pages * torch.arange(metadata.kv_heads)[:, None]
        pages = (torch.from_numpy(metadata.page_table[row, columns]) + head_offsets).flatten()
        head_dim = self._layers[layer].head_dim
        out = torch.empty(len(pages), metadata.page_size * head_dim)
        gather_pages(pool, None if scales is None else scales[kind], pages, out)
        return out.view(1, metadata.kv_heads, -1, head_dim)[:, :, : seq_len - first_page * metadata.page_size]

    def _mask(self, layer: int, row: int, k: Tensor, first_key: int) -> Tensor:  # noqa: ARG002
        """Return ``[queries, keys]`` float32: 0 where a query sees a key of ``k``, -inf elsewhere."""
        span = self._layers[layer].span
        seq_len, query_len = int(self._metadata.seq_lens[row]), int(self._metadata.query_lens[row])
        num_computed = seq_len - query_len
        positions = torch.arange(seq_len)
        tree = self._metadata.tree_masks.get(row)
        if tree is not None:
            positions[num_computed:] = num_computed + torch.from_numpy(tree.depths)
        query_positions = positions[num_computed:, None]
        visible = positions <= query_positions
        if tree is not None:
            visible[:, num_computed:] = torch.from_numpy(tree.visible)
        if span.window is not None:
            visible &= positions > query_positions - span.window
        if span.chunk is not None:
            visible &= positions >= query_positions // span.chunk * span.chunk
        return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, first_key:]


def _split_into_tokens(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the metadata of the same step with a row for each token."""
    return replace(
        metadata,
        page_table=np.repeat(metadata.page_table, metadata.query_lens, axis=0),
        query_lens=np.ones_like(metadata.token_indices),
        seq_lens=metadata.token_indices + 1,
    )


def normalize_and_rotate(
    config: LayerAttentionConfig, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values, from the arguments of ``FusedAttentionBackend``."""
    qk, v = qkv[:, : config.heads + config.kv_heads], qkv[:, config.heads + config.kv_heads :]
    qk = rotary(qk if norm is None else rms_norm(qk, norm[: qk.shape[1]], eps), cos, sin)
    keys = qk[:, config.heads :]
    return qk[:, : config.heads], keys, keys if config.is_latent else v
