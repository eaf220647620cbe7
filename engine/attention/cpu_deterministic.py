"""Paged attention whose result for a token is, bit for bit, a function of that token's sequence alone.

A matrix product of one shape computes each row of its result from that row and the other matrix in one fixed way, while
products of other shapes may add in another order. So everything here has one shape: queries in tiles that begin at
multiples of ``TILE`` positions, keys in blocks of the same size from the sequence's start, each pair of a tile and a
block one product. Blocks are added up from the first to the last, and a block that a query does not see adds an exact
zero. Whoever else is in the batch, wherever a prompt was cut into chunks and whatever came from the cache, the same
numbers are added in the same order.

The same holds for ``exp`` and ``tanh``: numpy's do not depend on where in memory a number stands, while torch's
compute what the vector registers leave over at the end of each thread's share in another way.

It reads every prefix for every sequence and computes tiles that are mostly empty: a mode for those who need replays to
be exact, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.layer import LayerAttention
from engine.attention.paged_tensors import gather, write
from engine.attention.plan import Ints, Rows
from engine.attention.projections import turned

TILE = 4
"""Positions in a tile of queries."""
_BLOCK = 64
"""Keys in a block, or one page if that is more."""
_SCORES = 1 << 22
"""Scores of this many float32 (16 MiB) are kept at once."""


class DeterministicAttention:
    """``LayerAttend`` on the CPU, reproducible to the bit, where no kernel can be compiled."""

    def __init__(self, layers: Sequence[LayerAttention], kv: Tensor, scales: Tensor | None = None) -> None:
        """``kv``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values. With 8-bit ``kv``,
        ``scales``: ``[layers, 2, kv_heads, pages, page_size]`` float32."""
        self._layers = layers
        self._kv = list(kv)
        self._scales: list[Tensor | None] = [None] * len(kv) if scales is None else list(scales)

    def prepare(self, rows: Rows) -> None:
        """Cuts a step's new tokens into tiles."""
        size, before = rows.page_size, rows.contexts - rows.queries
        first = before // TILE
        counts = -(-rows.contexts // TILE) - first
        row = np.repeat(np.arange(len(counts)), counts)
        tile = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + first[row]
        position = tile[:, None] * TILE + np.arange(TILE)
        inside = (position >= before[row, None]) & (position < rows.contexts[row, None])
        tokens = np.where(inside, rows.starts[row, None] + position - before[row, None], 0)
        self._slots = torch.from_numpy(rows.head_slots)
        self._position = torch.from_numpy(position)
        self._tokens = torch.from_numpy(tokens)
        self._inside = torch.from_numpy(inside.reshape(-1))
        self._blocks = self._block_pages(rows, row, max(1, _BLOCK // size))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Attend``."""
        about, kv = self._layers[layer], self._kv[layer]
        write(kv, self._scales[layer], self._slots, k, v)
        tiles, _, blocks, pages = self._blocks.shape
        per_kv = about.heads // about.kv_heads
        own = (q[self._tokens] * about.scale).view(tiles, TILE, about.kv_heads, per_kv, about.head_dim)
        own = own.permute(0, 2, 3, 1, 4).reshape(tiles, about.kv_heads, per_kv * TILE, about.head_dim)
        width = max(1, _SCORES // (about.heads * TILE * blocks * pages * kv.shape[3]))
        mixed = torch.cat([self._mix(about, layer, own, slice(some, some + width)) for some in range(0, tiles, width)])
        mixed = mixed.view(tiles, about.kv_heads, per_kv, TILE, about.head_dim).permute(0, 3, 1, 2, 4)
        return mixed.reshape(tiles * TILE, -1)[self._inside]

    def projected(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``LayerAttend``."""
        return self(layer, *turned(self._layers[layer], qkv, norm, eps, cos, sin))

    def _mix(self, about: LayerAttention, layer: int, q: Tensor, some: slice) -> Tensor:
        """Attention of some tiles: ``[tiles, kv_heads, heads_per_kv * TILE, head_dim]``."""
        q, pages = q[some], self._blocks[some]
        tiles, heads, queries, _ = q.shape
        position = self._position[some].repeat(1, about.heads // about.kv_heads)[:, None, :, None]
        parts = []
        for block in range(pages.shape[2]):
            keys = self._read(layer, 0, pages[:, :, block])
            scores = torch.bmm(q.flatten(0, 1), keys.transpose(1, 2)).view(tiles, heads, queries, -1)
            if about.softcap is not None:
                scores = scores.div_(about.softcap)
                np.tanh(scores.numpy(), out=scores.numpy())
                scores = scores.mul_(about.softcap)
            key = torch.arange(keys.shape[1]) + block * keys.shape[1]
            hidden = key > position
            if about.window is not None:
                hidden |= key <= position - about.window
            parts.append(scores.masked_fill_(hidden, -torch.inf))
        largest = torch.stack([part.amax(dim=-1, keepdim=True) for part in parts]).amax(dim=0)
        out, total = q.new_zeros(q.shape), q.new_zeros(tiles, heads, queries, 1)
        for block, part in enumerate(parts):
            weights = part.sub_(largest)
            np.exp(weights.numpy(), out=weights.numpy())
            values = self._read(layer, 1, pages[:, :, block])
            out += torch.bmm(weights.flatten(0, 1), values).view(q.shape)
            total += weights.sum(dim=-1, keepdim=True)
        return out.div_(total)

    def _read(self, layer: int, kind: int, pages: Tensor) -> Tensor:
        """Keys (``kind`` 0) or values (1) of one block of each tile: ``[tiles * kv_heads, block, head_dim]``."""
        pool, factors = self._kv[layer][kind], self._scales[layer]
        out = torch.empty(pages.numel(), pool.shape[2] * pool.shape[3])
        gather(pool, None if factors is None else factors[kind], pages.reshape(-1), out)
        return out.view(pages.shape[0] * pages.shape[1], -1, pool.shape[3])

    def _block_pages(self, rows: Rows, row: Ints, pages: int) -> Tensor:
        """``[tiles, kv_heads, blocks, pages]`` of the pool seen as ``[kv_heads * pages, …]``; what lies behind a
        sequence's last page is any page, for no query sees it."""
        blocks = -(-int(rows.contexts.max()) // (pages * rows.page_size))
        column = np.minimum(np.arange(blocks * pages), rows.pages.shape[1] - 1)
        own = rows.pages[row[:, None], column].reshape(len(row), 1, blocks, pages)
        return torch.from_numpy(own + rows.pool_pages * np.arange(rows.kv_heads)[:, None, None])
