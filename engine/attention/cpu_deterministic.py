"""Paged attention whose result for a token is, bit for bit, a function of that token's sequence alone.

A matrix product of one shape computes each row of its result from that row and the other matrix in one fixed way, while
products of other shapes may add in another order. So every product here has one shape: queries in tiles that begin at
multiples of ``TILE`` positions, keys in blocks of the same size from the sequence's start, one product for each pair of
a tile and a block. Blocks are added up from the first to the last, and a block that a query does not see adds an exact
zero. The same numbers are added in the same order, whatever else is in the batch, wherever a prompt was cut into chunks
and whatever came from the cache.

``exp`` and ``tanh`` are NumPy's, whose results do not depend on the address of a number. Torch's compute the numbers
left over at the end of each thread's share in another way.

Every prefix is read for every sequence, and most tiles are nearly empty: the mode is for exact replays, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.attention.paged_tensors import gather_pages, write_kv
from engine.attention.plan import AttentionMetadata, IntArray
from engine.attention.projections import normalize_and_rotate

TILE = 4
"""Positions in a tile of queries."""
_BLOCK = 64
"""Keys in a block, or one page if that is more."""
_MAX_SCORES = 1 << 22
"""Scores kept at once (16 MiB of float32)."""


class DeterministicAttention:
    """A bitwise reproducible ``FusedAttentionBackend`` for the CPU, where no kernel can be compiled."""

    def __init__(self, layers: Sequence[LayerAttentionConfig], kv: Tensor, scales: Tensor | None = None) -> None:
        """``kv``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values. With 8-bit ``kv``,
        ``scales``: ``[layers, 2, kv_heads, pages, page_size]`` float32."""
        self._layers = layers
        self._kv = list(kv)
        self._scales: list[Tensor | None] = [None] * len(kv) if scales is None else list(scales)

    def prepare(self, metadata: AttentionMetadata) -> None:
        num_computed = metadata.seq_lens - metadata.query_lens
        first_tile = num_computed // TILE
        num_tiles = -(-metadata.seq_lens // TILE) - first_tile
        row = np.repeat(np.arange(len(num_tiles)), num_tiles)
        tile = np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles) + first_tile[row]
        positions = tile[:, None] * TILE + np.arange(TILE)
        is_query = (positions >= num_computed[row, None]) & (positions < metadata.seq_lens[row, None])
        tokens = np.where(is_query, metadata.query_starts[row, None] + positions - num_computed[row, None], 0)
        self._slots = torch.from_numpy(metadata.kv_slots)
        self._positions = torch.from_numpy(positions)
        self._tokens = torch.from_numpy(tokens)
        self._is_query = torch.from_numpy(is_query.reshape(-1))
        self._blocks = _block_pages(metadata, row, max(1, _BLOCK // metadata.page_size))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config, kv = self._layers[layer], self._kv[layer]
        write_kv(kv, self._scales[layer], self._slots, k, v)
        num_tiles, _, blocks, pages = self._blocks.shape
        per_kv = config.heads // config.kv_heads
        tiles = (q[self._tokens] * config.scale).view(num_tiles, TILE, config.kv_heads, per_kv, config.head_dim)
        tiles = tiles.permute(0, 2, 3, 1, 4).reshape(num_tiles, config.kv_heads, per_kv * TILE, config.head_dim)
        step = max(1, _MAX_SCORES // (config.heads * TILE * blocks * pages * kv.shape[3]))
        parts = [self._attend(layer, tiles, slice(start, start + step)) for start in range(0, num_tiles, step)]
        out = torch.cat(parts).view(num_tiles, config.kv_heads, per_kv, TILE, config.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(num_tiles * TILE, -1)[self._is_query]

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        return self(layer, *normalize_and_rotate(self._layers[layer], qkv, norm, eps, cos, sin))

    def _attend(self, layer: int, q: Tensor, part: slice) -> Tensor:
        """Return the attention of some tiles: ``[tiles, kv_heads, heads_per_kv * TILE, head_dim]``."""
        config, q, pages = self._layers[layer], q[part], self._blocks[part]
        tiles, heads, queries, _ = q.shape
        positions = self._positions[part].repeat(1, config.heads // config.kv_heads)[:, None, :, None]
        scores_by_block = []
        for block in range(pages.shape[2]):
            keys = self._read(layer, 0, pages[:, :, block])
            scores = torch.bmm(q.flatten(0, 1), keys.transpose(1, 2)).view(tiles, heads, queries, -1)
            if config.softcap is not None:
                scores = scores.div_(config.softcap)
                np.tanh(scores.numpy(), out=scores.numpy())
                scores = scores.mul_(config.softcap)
            key_positions = torch.arange(keys.shape[1]) + block * keys.shape[1]
            is_hidden = key_positions > positions
            if config.window is not None:
                is_hidden |= key_positions <= positions - config.window
            scores_by_block.append(scores.masked_fill_(is_hidden, -torch.inf))
        largest = torch.stack([scores.amax(dim=-1, keepdim=True) for scores in scores_by_block]).amax(dim=0)
        out, total = q.new_zeros(q.shape), q.new_zeros(tiles, heads, queries, 1)
        for block, scores in enumerate(scores_by_block):
            weights = scores.sub_(largest)
            np.exp(weights.numpy(), out=weights.numpy())
            values = self._read(layer, 1, pages[:, :, block])
            out += torch.bmm(weights.flatten(0, 1), values).view(q.shape)
            total += weights.sum(dim=-1, keepdim=True)
        return out.div_(total)

    def _read(self, layer: int, kind: int, pages: Tensor) -> Tensor:
        """Return keys (``kind`` 0) or values (1) of one block of each tile: ``[tiles * kv_heads, block, head_dim]``."""
        pool, scales = self._kv[layer][kind], self._scales[layer]
        out = torch.empty(pages.numel(), pool.shape[2] * pool.shape[3])
        gather_pages(pool, None if scales is None else scales[kind], pages.reshape(-1), out)
        return out.view(pages.shape[0] * pages.shape[1], -1, pool.shape[3])


def _block_pages(metadata: AttentionMetadata, row: IntArray, pages_per_block: int) -> Tensor:
    """Return ``[tiles, kv_heads, blocks, pages]``, indices into the pool seen as ``[kv_heads * pages, …]``.

    ``row``: ``[tiles]`` row of each tile. Behind a sequence's last page stands any page, since no query sees it.
    """
    num_blocks = -(-int(metadata.seq_lens.max()) // (pages_per_block * metadata.page_size))
    columns = np.minimum(np.arange(num_blocks * pages_per_block), metadata.page_table.shape[1] - 1)
    pages = metadata.page_table[row[:, None], columns].reshape(len(row), 1, num_blocks, pages_per_block)
    head_offsets = metadata.num_pool_pages * np.arange(metadata.kv_heads)[:, None, None]
    return torch.from_numpy(pages + head_offsets)
