"""Paged attention on the CPU by one kernel a layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.layer import LayerAttention
from engine.attention.plan import Ints, Rows
from kernels.cpu.attention.keys import KINDS, STEP_WORDS
from kernels.cpu.attention.paged import attend, scratch_floats, tile_tokens
from kernels.cpu.attention.plan import plan, plan_room
from kernels.cpu.attention.rotary_write import rotary_write
from kernels.cpu.runtime.recorder import empty

_ALONE = 1 << 14
"""Numbers that one thread turns before two would have begun."""
_ALONE_KEYS = 1 << 20
"""Products of queries and keys that one thread computes before two would have begun."""


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
        scratch, states = empty(self._threads * apart), empty(2 * tokens * about.heads)
        rows, ends, slots = (part.data_ptr() for part in self._plan)
        first, no_tree = (part.data_ptr() for part in self._rest)
        words = (scratch.data_ptr(), self._pages.ctypes.data, rows, first, ends, first, no_tree, first, first, first)
        counts = tokens, self._pages.shape[1], 0, self._longest, apart
        step = torch.tensor([*words, states.data_ptr(), *counts, slots], dtype=torch.int64)
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
        self._scratch = self._states = torch.empty(0)
        self._trees: dict[int | None, list[Tensor]] = {}
        self._rooms = {window: torch.empty(0, dtype=torch.int64) for window in self._windows}
        self._steps = {window: torch.zeros(STEP_WORDS, dtype=torch.int64) for window in self._windows}
        """What ``attend`` wants to know of a step; the addresses of these stay."""

    def prepare(self, rows: Rows) -> None:
        """Plans a step."""
        self._threads = torch.get_num_threads()
        (count, columns), per_kv = rows.pages.shape, rows.heads_per_kv
        tokens, tile = int(rows.queries.sum()), tile_tokens(per_kv)
        apart = scratch_floats(self._layers[0].head_dim, per_kv, columns * rows.page_size)
        self._scratch = _room(self._scratch, apart * self._threads)
        self._states = _room(self._states, 2 * tokens * rows.kv_heads * per_kv)
        size = plan_room(count, tokens, count * columns * self._blocks, tile)
        given = [torch.from_numpy(np.ascontiguousarray(part)) for part in (rows.pages, rows.queries, rows.contexts)]
        shape = count, tokens, columns, self._blocks, rows.page_size
        cost = rows.cost.token_bytes, rows.cost.piece, rows.cost.query
        for window, words in self._steps.items():
            room = self._rooms[window] = _room(self._rooms[window], size)
            how = window or 0, int(self._sharing), tile, *cost, apart
            trees = self._trees[window] = [torch.from_numpy(part) for part in _trees(rows, window)]
            plan(words, room, *given, *(trees or (0, 0, 0)), self._scratch, self._states, *shape, *how, threads=1)

    def projected(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``LayerAttend``."""
        step = self._steps[self._layers[layer].window].data_ptr()
        return self._launch(layer, qkv, norm, eps, (cos, sin), step, self._threads)


def _room(held: Tensor, size: int) -> Tensor:
    """Memory for ``size`` numbers: what is held if that is enough."""
    return held if held.shape[0] >= size else torch.empty(2 * size, dtype=held.dtype)


def _trees(rows: Rows, window: int | None) -> tuple[npt.NDArray[np.generic], ...]:
    """For each row where its tree lies, or -1; the depths of all trees' tokens, and which of its tokens each sees;
    nothing where there are no trees."""
    if not rows.trees:
        return ()
    where, depths, masks = np.full((len(rows.queries), 2), -1), [], []
    mask = depth = 0
    for row, tree in rows.trees.items():
        where[row] = mask, depth
        mask, depth = mask + tree.sees.size, depth + len(tree.depths)
        depths.append(tree.depths)
        near = True if window is None else tree.depths > tree.depths[:, None] - window
        masks.append((tree.sees & near).reshape(-1))
    return where, np.concatenate(depths), np.concatenate(masks)
