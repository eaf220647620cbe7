"""Attention over a paged key-value pool: every row of a batch reads its own pages, whatever its number of new tokens.

A row is one sequence: ``queries`` new tokens that end a ``context`` of tokens whose keys and values lie in the pool.
One query is ordinary decoding, many are a prefill chunk; both take the same path. Rows of similar shape form a group,
and a group is one gather of pages and one dense attention, padded to its longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

Ints = npt.NDArray[np.int64]

_BLOCK_FLOATS = 1 << 18
"""Gathered keys and values of this many float32 (1 MiB) are attended to while they are still in the cache."""

_SHORTEST_CLASS = 6
"""Contexts up to 2**6 tokens share a group: splitting them would cost more in launches than padding does."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows padded to one shape: ``rows`` by ``queries`` new tokens by ``keys`` context tokens."""

    start: int
    """The group's tokens are ``start:stop`` of the batch's flat token axis."""
    stop: int
    pages: Tensor
    """``[rows * pages]`` page numbers of each row, padded with any valid page."""
    mask: Tensor
    """``[rows, 1, heads_per_kv * queries, keys]`` float32: 0 where a query sees a key, -inf elsewhere."""
    padded: Tensor | None
    """``[rows * queries]`` flat token of each padded query; ``None`` when every row has exactly one."""
    flat: Tensor | None
    """``[stop - start]`` padded query of each flat token; ``None`` when every row has exactly one."""
    positions: Tensor
    """``[rows, 1, heads_per_kv * queries, 1]`` position of each query in its sequence."""
    windows: dict[int, Tensor] = field(default_factory=dict)
    """Masks of sliding windows, made when a layer first asks."""

    def windowed(self, window: int) -> Tensor:
        """``mask``, but a query sees its latest ``window`` keys only."""
        if window not in self.windows:
            gone = torch.arange(self.mask.shape[-1]) <= self.positions - window
            self.windows[window] = self.mask.masked_fill(gone, -torch.inf)
        return self.windows[window]


def row_classes(queries: Ints, contexts: Ints) -> Ints:
    """A class number for each row. Rows of one class differ by less than a factor of two in both lengths."""
    query_class = np.ceil(np.log2(queries)).astype(np.int64)
    key_class = np.maximum(np.ceil(np.log2(contexts)).astype(np.int64), _SHORTEST_CLASS)
    return query_class * 64 + key_class


def plan_rows(pages: Ints, queries: Ints, contexts: Ints, page_size: int, heads_per_kv: int) -> list[RowGroup]:
    """Groups rows that are already sorted by ``row_classes``.

    ``pages``: ``[rows, max_pages]``; ``queries`` and ``contexts``: ``[rows]``. The plan serves every layer of one step.
    """
    classes = row_classes(queries, contexts)
    borders = np.flatnonzero(np.diff(classes)) + 1
    groups, token = [], 0
    for first, last in zip([0, *borders], [*borders, len(classes)], strict=True):
        rows = slice(first, last)
        group = _group(pages[rows], queries[rows], contexts[rows], page_size, heads_per_kv, token)
        groups.append(group)
        token = group.stop
    return groups


def paged_attention(
    q: Tensor,
    pool: Tensor,
    groups: Sequence[RowGroup],
    workspace: Workspace,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention over the pages of each row.

    ``q``: ``[tokens, heads, head_dim]``, rows one after the other. ``pool``: ``[pages, page_size, 2 * kv_heads,
    head_dim]``, the keys of all heads before the values. Returns ``[tokens, heads * head_dim]``.
    """
    tokens, heads, dim = q.shape
    kv_heads = pool.shape[2] // 2
    per_kv = heads // kv_heads
    flat_pool = pool.view(len(pool), -1)
    out = q.new_empty(tokens, heads * dim)
    for group in groups:
        rows, _, folded, keys = group.mask.shape
        wide, width = folded // per_kv, len(group.pages) // rows
        own = q[group.start : group.stop] if group.padded is None else q[group.padded]
        # The queries that share a key-value head become extra query rows, so its keys are read once.
        own = own.view(rows, wide, kv_heads, per_kv, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, folded, dim)
        mixed = q.new_empty(rows, kv_heads, per_kv, wide, dim)
        block = max(1, _BLOCK_FLOATS // (width * flat_pool.shape[1]))
        for first in range(0, rows, block):
            some = slice(first, min(first + block, rows))
            pages = group.pages[some.start * width : some.stop * width]
            kv = torch.index_select(flat_pool, 0, pages, out=workspace.take(len(pages), flat_pool.shape[1]))
            kv = kv.view(some.stop - first, -1, 2 * kv_heads, dim)[:, :keys].transpose(1, 2)
            mask = (group.mask if window is None else group.windowed(window))[some].expand(-1, kv_heads, -1, -1)
            attended = _attend(own[some], kv[:, :kv_heads], kv[:, kv_heads:], mask, scale, softcap)
            mixed[some] = attended.view(-1, kv_heads, per_kv, wide, dim)
        result = mixed.permute(0, 3, 1, 2, 4).reshape(rows * wide, heads * dim)
        out[group.start : group.stop] = result if group.flat is None else result[group.flat]
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap)) * softcap
    return torch.softmax(scores + mask, dim=-1) @ v


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


def _group(pages: Ints, queries: Ints, contexts: Ints, page_size: int, heads_per_kv: int, start: int) -> RowGroup:
    wide, keys = int(queries.max()), int(contexts.max())
    # Position of every padded query; a padded one repeats its row's last query and is dropped afterwards.
    offset = np.minimum(np.arange(wide), queries[:, None] - 1)
    position = (contexts - queries)[:, None] + offset
    hidden = np.where(np.arange(keys) <= position[..., None], np.float32(0), np.float32(-np.inf))
    mask = torch.from_numpy(hidden)[:, None, None].expand(-1, 1, heads_per_kv, -1, -1).flatten(2, 3)
    positions = torch.from_numpy(position)[:, None, None, :].expand(-1, 1, heads_per_kv, -1).flatten(2, 3)[..., None]
    padded = flat = None
    if wide > 1:
        first = start + np.cumsum(queries) - queries
        padded = torch.from_numpy((first[:, None] + offset).reshape(-1))
        flat = torch.from_numpy(np.flatnonzero(np.arange(wide) < queries[:, None]))
    index = torch.from_numpy(np.ascontiguousarray(pages[:, : -(-keys // page_size)]).reshape(-1))
    return RowGroup(start, start + int(queries.sum()), index, mask, padded, flat, positions)
