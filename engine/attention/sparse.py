"""Sparse attention over latents: each query attends to the tokens that an indexer ranks highest, in torch operators.

DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556, "DeepSeek Sparse Attention". The indexer has a few small heads. Its
keys lie behind the latents of the cache, in the same vectors, where the queries of the attention are zero. This is a
plain reference, exact for any length: it computes all scores, and leaves out what the indexer did not choose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.cpu_torch import TorchAttention


class IndexQueries(NamedTuple):
    """Queries of the indexer for the tokens of a step."""

    queries: Tensor
    """``[tokens, heads, head_dim]``, rotated."""
    weights: Tensor
    """``[tokens, heads]``, of the heads' scores."""


class SparseAttention(TorchAttention):
    """A ``TorchAttention`` whose layers have an ``IndexerConfig``.

    ``index``: the queries of the next call, ``None`` where a layer attends to the tokens that the layer before it did.
    """

    index: IndexQueries | None = None

    def _attend_row(self, layer: int, row: int, q: Tensor, tokens: slice) -> Tensor:
        self._tokens = tokens
        return super()._attend_row(layer, row, q, tokens)

    def _mask(self, layer: int, row: int, k: Tensor, first_key: int) -> Tensor:
        """Return the mask of visible tokens without those that are not chosen."""
        mask = super()._mask(layer, row, k, first_key)
        indexer = self._layers[layer].indexer
        assert indexer is not None
        if self.index is None:
            return self._masks[row]
        if row == 0:
            self._masks: dict[int, Tensor] = {}
        queries, weights = (part[self._tokens] for part in self.index)
        scores = torch.relu(queries @ k[0, 0, :, -indexer.head_dim :].T * indexer.head_dim**-0.5)
        ranks = (weights[:, None] * indexer.heads**-0.5 @ scores)[:, 0] + mask
        # Of equal scores the earlier token is chosen.
        chosen = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : indexer.top_k]
        self._masks[row] = torch.full_like(mask, -torch.inf).scatter_(1, chosen, mask.gather(1, chosen))
        return self._masks[row]
