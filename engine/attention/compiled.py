"""Paged attention on the CPU by one kernel a layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import LayerAttention
from engine.attention.plan import Ints, Rows, share_prefixes
from kernels.cpu.attention import KINDS, STEP_WORDS, attend, rotary_write, scratch_floats, tile_tokens
from kernels.cpu.tape import empty

_ALONE = 1 << 14
"""Numbers that one thread turns before two would have begun."""
_ALONE_KEYS = 1 << 20
"""Products of queries and keys that one thread computes before two would have begun."""
_NO_TREE = np.zeros(1, np.bool_)


class _Kernels(ABC):
    """A layer's launches, which read at an address what is to know of a step."""

    def __init__(self, layers: Sequence[LayerAttention], kv: Tensor, scales: Tensor | None) -> None:
        """See ``CompiledAttention``."""
        self._layers = layers
        self._kv, self._kind = list(kv), KINDS[kv.dtype]
        self._scales: list[Tensor | int] = [0] * len(self._kv) if scales is None else list(scales)
        # A page that holds whole blocks of sixteen tokens is as many pages for the kernel, which then need not divide.
        self._blocks = 1 if kv.shape[4] % 16 else kv.shape[4] // 16
        self._page_size = kv.shape[4] // self._blocks
        self._capacity = kv.shape[3] * kv.shape[4]
        self._unturned = torch.empty(0, 0)

    @abstractmethod
    def projected(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``LayerAttend``."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Attend``."""
        return self.projected(layer, torch.cat((q, k, v), dim=1), None, 0.0, self._unturned, self._unturned)

    def _launch(
        self,
        layer: int,
        qkv: Tensor,
        norm: Tensor | None,
        eps: float,
        angles: tuple[Tensor, Tensor],
        step: int,
        threads: int,
    ) -> Tensor:
        """``LayerAttend.projected`` of the ``step`` at that address."""
        about, tokens = self._layers[layer], len(qkv)
        cache = self._kv[layer], self._scales[layer], self._kind
        shape = about.heads, about.kv_heads, about.head_dim
        weight, alone = 0 if norm is None else norm.data_ptr(), 1 if qkv.numel() < _ALONE else threads
        turned = angles[0].shape[1], self._capacity
        rotary_write(qkv, weight, eps, *angles, step, *cache, tokens, *shape, *turned, threads=alone)
        out = empty(tokens, about.heads * about.head_dim)
        pool = self._capacity, self._page_size, threads // math.gcd(threads, about.kv_heads)
        attend(qkv, *cache, out, step, *shape, *pool, about.scale, about.softcap or 0.0, threads=threads)
        return out


class AloneAttention(_Kernels):
    """``LayerAttend`` of the tokens of a step that is repeated from a tape: each reads for itself all keys of its row,
    up to its own. ``plan`` ``[3, tokens]`` int64 says where: rows of the cache's page table, numbers of keys, and the
    slots that the tokens' own are written to."""

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        kv: Tensor,
        scales: Tensor | None,
        pages: Ints,
        plan: Tensor,
        *,
        longest: int,
    ) -> None:
        """``pages``: the page table ``[rows, columns]``, of pages of 16 tokens or no multiple of 16. ``longest``: most
        keys of a token. No layer has a window. For the others see ``CompiledAttention``."""
        super().__init__(layers, kv, scales)
        about, tokens = layers[0], plan.shape[1]
        work = tokens * about.heads * about.head_dim * longest
        self._threads = 1 if work < _ALONE_KEYS else torch.get_num_threads()
        self._pages, self._plan, self._longest = pages, plan, longest
        self._rest = torch.stack((torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), -1)))
        """No token has a first key but 0, or a tree."""
        self._steps: list[Tensor] = []
        """What ``attend`` was told, for as long as a tape may tell it again."""

    def projected(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``LayerAttend``."""
        about, tokens = self._layers[layer], len(qkv)
        apart = scratch_floats(about.head_dim, about.heads // about.kv_heads, self._longest)
        scratch, totals = empty(self._threads * apart), empty(tokens * about.heads)
        rows, ends, slots = (part.data_ptr() for part in self._plan)
        first, no_tree = (part.data_ptr() for part in self._rest)
        words = (scratch.data_ptr(), self._pages.ctypes.data, rows, first, ends, first, no_tree, first, first, first)
        counts = tokens, self._pages.shape[1], 0, self._longest, apart
        step = torch.tensor([*words, totals.data_ptr(), *counts, slots], dtype=torch.int64)
        self._steps.append(step)
        return self._launch(layer, qkv, norm, eps, (cos, sin), step.data_ptr(), self._threads)


class CompiledAttention(_Kernels):
    """``LayerAttend`` on the CPU.

    With ``sharing`` a prefix that several branches have in common is read once for all of them, and the beginning of a
    prompt once for many of its tokens. Without it each token reads its own keys, always in the same order, so that the
    result for a token is, bit for bit, a function of that token's sequence alone.
    """

    def __init__(
        self, layers: Sequence[LayerAttention], kv: Tensor, scales: Tensor | None = None, *, sharing: bool = True
    ) -> None:
        """``kv``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values; ``head_dim`` a multiple of
        16. float32, or 8-bit with ``scales``: ``[layers, 2, kv_heads, pages, page_size]`` float32."""
        super().__init__(layers, kv, scales)
        self._sharing = sharing
        self._windows = list(dict.fromkeys(layer.window for layer in layers))
        self._scratch = torch.empty(0)
        self._steps = {window: torch.zeros(STEP_WORDS, dtype=torch.int64) for window in self._windows}
        """What ``attend`` wants to know of a step; the addresses of these stay."""

    def prepare(self, rows: Rows) -> None:
        """Plans a step."""
        self._threads = torch.get_num_threads()
        self._kept = [self._plan(rows, window, words) for window, words in self._steps.items()]

    def projected(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``LayerAttend``."""
        step = self._steps[self._layers[layer].window].data_ptr()
        return self._launch(layer, qkv, norm, eps, (cos, sin), step, self._threads)

    def _plan(self, rows: Rows, window: int | None, words: Tensor) -> tuple[Tensor, ...]:
        """Writes what ``attend`` wants to know. Returns what the addresses among it are of."""
        row = np.repeat(np.arange(len(rows.queries)), rows.queries)
        before, count = rows.contexts - rows.queries, len(row)
        position = np.arange(count) - rows.starts[row] + before[row]
        end, first = position + 1, np.zeros_like(position)
        tree_begin, tree_at, tree = first, np.full_like(row, -1), [_NO_TREE]
        if rows.trees:
            tree_begin = np.zeros_like(row)
        for index, branches in rows.trees.items():
            own = slice(int(rows.starts[index]), int(rows.starts[index] + rows.queries[index]))
            position[own] = before[index] + branches.depths
            sees, size = branches.sees, len(branches.depths)
            if window is not None:
                sees = sees & (branches.depths > branches.depths[:, None] - window)
            end[own], tree_begin[own] = rows.contexts[index], before[index]
            tree_at[own] = sum(map(len, tree)) + size * np.arange(size)
            tree.append(sees.reshape(-1))
        pieces: list[_Piece] = []
        if window is not None and window < rows.contexts.max():
            first = np.maximum(position + 1 - window, 0)
        elif self._sharing and count > 1:
            pieces, first = self._pieces(rows, row)
        spans = np.cumsum([0, *(len(piece.tokens) for piece in pieces)])
        table = [
            (piece.row, piece.first, piece.end, *span)
            for piece, *span in zip(pieces, spans[:-1].tolist(), spans[1:].tolist(), strict=True)
        ]
        longest = int((end - first).max())
        apart = scratch_floats(self._layers[0].head_dim, rows.heads_per_kv, longest)
        if len(self._scratch) < apart * self._threads:
            self._scratch = torch.empty(apart * self._threads)
        # All integers in one array: to make a tensor of each would take longer than to attend.
        pages = (rows.pages[..., None] * self._blocks + np.arange(self._blocks)).reshape(len(rows.pages), -1)
        parts = [pages.reshape(-1), row, first, end, tree_begin, tree_at, rows.slots]
        parts += [np.array(table, np.int64).reshape(-1), *(piece.tokens for piece in pieces)]
        integers = torch.from_numpy(np.concatenate(parts))
        places = (integers.data_ptr() + 8 * np.cumsum([0, *map(len, parts)])).tolist()
        masks, totals = torch.from_numpy(np.concatenate(tree)), torch.empty(count * rows.kv_heads * rows.heads_per_kv)
        words.numpy()[:] = (
            self._scratch.data_ptr(),
            *places[:6],
            masks.data_ptr(),
            *places[7:9],
            totals.data_ptr(),
            *(count, pages.shape[1], len(table), longest, apart),
            places[6],
        )
        return self._scratch, integers, masks, totals

    def _pieces(self, rows: Rows, row: Ints) -> tuple[list[_Piece], Ints]:
        """What several tokens read together, and for each token the first key that it reads for itself."""
        before = rows.contexts - rows.queries
        begins, shared = share_prefixes(rows, before // rows.page_size)
        pieces = [
            _Piece(
                int(part.rows[0]),
                part.page * rows.page_size,
                part.page * rows.page_size + part.tokens,
                rows.tokens(part.rows),
            )
            for part in shared
        ]
        first = (begins * rows.page_size)[row]
        size = tile_tokens(rows.heads_per_kv)
        for index in np.flatnonzero(rows.queries > 1).tolist():
            start, count = int(rows.starts[index]), int(rows.queries[index])
            for offset in range(0, count, count if index in rows.trees else size):
                tokens = np.arange(start + offset, start + min(offset + size, count))
                begin, end = int(first[start + offset]), int(before[index]) + offset
                if rows.cost.shares(end - begin, len(tokens), len(tokens)):
                    pieces.append(_Piece(index, begin, end, tokens))
                    first[tokens] = end
        return pieces, first


@dataclass(frozen=True, slots=True)
class _Piece:
    """Keys that all of some tokens see."""

    row: int
    """Whose pages they lie in."""
    first: int
    end: int
    tokens: Ints
