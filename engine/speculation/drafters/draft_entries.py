"""Keys and values of a draft layer on the CPU that exist only while some branches draft.

The entries of a branch's own tokens are in its pages; those of draft tokens are here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.layer import LayerAttentionConfig
from engine.attention.paged_tensors import gather_pages, write_kv
from engine.attention.plan import kv_slots
from engine.cache.page_table import PageTable
from engine.cache.paged_kv import KVCache
from engine.sampling.sampler import Ints
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters.tree_draft import Level

Bools = npt.NDArray[np.bool_]


class Span(NamedTuple):
    """Consecutive tokens of a branch."""

    table: PageTable
    first: int
    length: int


NO_SPAN = Span(PageTable(-1, [], namespace=None, last_node=None, num_shared_pages=0, num_cached_tokens=0), 0, 0)


class DraftEntries:
    """Entries that the draft tokens of some branches attend to: a copy of the branches' entries, then those that were
    still missing, then those of draft tokens, level by level.

    A level's rows are the queries of their branches and add an entry each. Branches with fewer rows are padded.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        requests: Sequence[DraftRequest],
        cache: KVCache,
        layer_config: LayerAttentionConfig,
    ) -> None:
        """Start with the spans, which are chains of missing entries, as the first level."""
        self._layer_config, self._spans, self._count = layer_config, spans, len(spans)
        rows, firsts, counts = np.array([(span.table.row, span.first, span.length) for span in spans]).T
        self._ends = firsts + counts
        self._end = int(firsts.max())
        depth, wide = max(request.depth for request in requests), max(_get_width(request) for request in requests)
        pages = -(-self._end // cache.page_size)
        room = self._end + int(counts.max()) + (depth - 1) * wide
        kinds = layer_config.shape.num_kinds
        shape = kinds, layer_config.kv_heads, self._count, room, layer_config.head_dim
        self._kv = torch.empty(shape)
        if pages:
            heads = cache.pool.size * np.arange(kinds * layer_config.kv_heads)[:, None]
            chosen = torch.from_numpy((heads + cache.page_table[rows, :pages].reshape(-1)).reshape(-1))
            own = self._kv.new_empty(len(chosen), cache.page_size * layer_config.head_dim)
            gather_pages(cache.data[-1], cache.scales_of(-1), chosen, own)
            own = own.view(kinds, layer_config.kv_heads, self._count, pages * cache.page_size, layer_config.head_dim)
            self._kv[:, :, :, : self._end] = own[:, :, :, : self._end]
        branches = np.arange(self._count).repeat(counts)
        self.last = counts.cumsum() - 1
        """Row of each branch's last missing entry."""
        which = np.arange(len(branches)) - (self.last + 1 - counts)[branches]
        self.positions: Ints = firsts[branches] + which
        """Positions of the latest level's rows."""
        sees = np.arange(self._end) < firsts[branches, None]
        self._add(branches, which, sees, which[:, None] >= np.arange(int(counts.max())))
        self._guessed = 0

    def append(self, level: Level) -> None:
        """Add room for the entries of a level's draft tokens."""
        branches = level.branches
        which = np.arange(len(branches)) - np.searchsorted(branches, branches)
        self.positions = self._ends[branches] + self._guessed
        before = self._sees if self._guessed else self._sees[self.last]
        self._add(branches, which, before[level.parents], which[:, None] == np.arange(int(which.max()) + 1))
        self._guessed += 1

    def _add(self, branches: Ints, which: Ints, before: Bools, own: Bools) -> None:
        """Add a level. ``which`` ``[rows]``: index of each row within its branch; ``before`` and ``own``: the earlier
        entries and the level's entries that each row sees."""
        self._wide = own.shape[1]
        self._places = branches * self._wide + which
        self._padded = len(branches) < self._count * self._wide
        self._sees = np.concatenate((before, own), axis=1)
        self._end += self._wide

    def publish(self, cache: KVCache) -> None:
        """Write the missing entries into the branches' pages, after their level was attended to."""
        size, kv = cache.page_size, self._kv[:, :, :, self._end - self._wide : self._end].flatten(2, 3).transpose(1, 2)
        rows = np.array([span.table.row for span in self._spans])[self._places // self._wide]
        page, offset = np.divmod(self.positions, size)
        kinds = self._layer_config.shape.num_kinds
        slots = kv_slots(
            cache.page_table[rows, page] * size + offset, cache.pool.size * size, kinds * self._layer_config.kv_heads
        )
        vectors = torch.cat(list(kv[:, self._places] if self._padded else kv), dim=1)
        write_kv(cache.data[-1], cache.scales_of(-1), torch.from_numpy(slots), vectors)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the attention of the level's rows: ``q`` ``[rows, heads, head_dim]``, ``k`` and ``v`` ``[rows,
        kv_heads, head_dim]``."""
        layer_config, count, wide = self._layer_config, self._count, self._wide
        new = self._kv[:, :, :, self._end - wide : self._end]
        new[0] = self._spread(k).permute(2, 0, 1, 3)
        if layer_config.shape.has_values:
            new[1] = self._spread(v).permute(2, 0, 1, 3)
        own = self._spread(q).view(count, wide, layer_config.kv_heads, -1, layer_config.head_dim).permute(2, 0, 3, 1, 4)
        keys, values = self._kv[0, :, :, : self._end], self._kv[-1, :, :, : self._end]
        mask = None if self._sees.all() else self._build_mask()
        mixed = F.scaled_dot_product_attention(own.flatten(2, 3), keys, values, mask, scale=layer_config.scale)
        mixed = mixed.view(layer_config.kv_heads, count, -1, wide, layer_config.head_dim).permute(1, 3, 0, 2, 4)
        mixed = mixed.reshape(count * wide, -1)
        return mixed[self._places] if self._padded else mixed

    def _spread(self, x: Tensor) -> Tensor:
        """Reshape ``[rows, n, head_dim]`` to ``[branches, wide, n, head_dim]``, with zeros where a branch has fewer
        rows."""
        shape = (self._count, self._wide, *x.shape[1:])
        if not self._padded:
            return x.reshape(shape)
        spread = x.new_zeros(shape)
        spread.flatten(0, 1)[self._places] = x
        return spread

    def _build_mask(self) -> Tensor:
        """Return the mask ``[1, branches, heads_per_kv * wide, entries]``, in the layout of ``attend``."""
        mask = np.zeros((self._count * self._wide, self._end), np.bool_)
        mask[:, 0] = True  # a padded query must attend to an entry, otherwise its softmax is NaN
        mask[self._places] = self._sees
        heads = self._layer_config.heads // self._layer_config.kv_heads
        each = torch.from_numpy(mask).view(self._count, 1, self._wide, self._end)
        return each.expand(-1, heads, -1, -1).flatten(1, 2)[None]


def _get_width(request: DraftRequest) -> int:
    """Return the maximum number of draft tokens of a level."""
    return 1 if request.nodes == request.depth else request.nodes
