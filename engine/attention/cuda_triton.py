"""Paged attention by one kernel for all rows of a step, for GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.layer import LayerAttention
from engine.attention.plan import Ints, Rows, share_prefixes
from kernels.attention.kv_write import rotary_write
from kernels.attention.paged import paged_attention
from kernels.common.attention_schedule import (
    NO_TREE,
    Buffers,
    Plan,
    Segments,
    Shape,
    Work,
    busy_programs,
    joined,
    packed_bits,
    plan_work,
    shared_keys,
)
from kernels.common.paged_keys import PagedKeys
from kernels.layers.norm import rms_norm

_KEPT = 128
"""Sets of buffers that are kept for steps of the same shape."""
_FEW = 25
"""Most new tokens of a row in a step whose shape will come again: one, and the largest tree of guesses."""


class TritonAttention:
    """``LayerAttend`` on a GPU.

    All index tensors are made once a step, in ``prepare``, and sent without waiting; the layers then only launch
    kernels. The index tensors of ``repeatable`` steps stay where they are: a CUDA graph that was captured of the layers
    of one such step computes every other one with the same ``buffers``.
    """

    def __init__(self, layers: Sequence[LayerAttention], kv: Tensor, scales: Tensor | None = None) -> None:
        """``kv``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values. With 8-bit ``kv``,
        ``scales``: ``[layers, 2, kv_heads, pages, page_size]`` float32."""
        self._layers = layers
        self._kv, self._scales = kv, scales
        self._caches = [
            PagedKeys(*layer, *(scales[index] if scales is not None else ())) for index, layer in enumerate(kv)
        ]
        self._windows = list(dict.fromkeys(layer.window for layer in layers))
        self._programs = busy_programs(kv.device)
        self._kept: dict[tuple[int | None, Shape], Buffers] = {}
        self._work: dict[int | None, Work] = {}

    def prepare(self, rows: Rows) -> None:
        """Plans a step and sends the plan."""
        self.repeatable = int(rows.queries.max()) <= _FEW
        """Whether in the step that was prepared last every row has few new tokens."""
        plans = [self._plan(rows, window) for window in self._windows]
        self.buffers = tuple(
            self._take(window, Shape.of(plan, rounded=self.repeatable), kept=self.repeatable)
            for window, plan in zip(self._windows, plans, strict=True)
        )
        """Of the step that was prepared last; a batch has at most as many tokens as their shapes."""
        work = [buffers.fill(plan) for buffers, plan in zip(self.buffers, plans, strict=True)]
        self._work = dict(zip(self._windows, work, strict=True))
        self._slots = work[0].slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Attend``."""
        # Turned by no angle.
        cos = torch.ones(len(q), 2, device=q.device)
        return self.rotated(layer, torch.cat((q, k), dim=1), v, cos, torch.zeros_like(cos))

    def projected(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``LayerAttend``."""
        about = self._layers[layer]
        qk, v = torch.split(qkv, [about.heads + about.kv_heads, about.kv_heads], dim=1)
        return self.rotated(layer, qk if norm is None else rms_norm(qk, norm, eps), v, cos, sin)

    def rotated(self, layer: int, qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``__call__`` for queries and keys whose positions are not encoded yet, ``[tokens, heads + kv_heads,
        head_dim]``: they are turned on their way. ``cos`` and ``sin``: ``[tokens, dim]`` float32, see
        ``rotary_tables``.

        Tokens behind the step's own are padding: nothing is kept of them, and what they get is undefined.
        """
        about = self._layers[layer]
        scales = None if self._scales is None else self._scales[layer]
        q = rotary_write(qk, v, cos, sin, self._slots[: len(qk)], self._kv[layer], scales)
        out = paged_attention(
            q,
            self._caches[layer],
            self._work[about.window],
            scale=about.scale,
            window=about.window,
            softcap=about.softcap,
        )
        return out.flatten(1)

    def _plan(self, rows: Rows, window: int | None) -> Plan:
        segments, positions, sees = _segments(rows, shared=window is None)
        width = -(-int(rows.contexts.max()) // rows.page_size)
        return plan_work(
            segments,
            rows.pages[:, :width],
            positions,
            rows.slots,
            heads_per_kv=rows.heads_per_kv,
            kv_heads=rows.kv_heads,
            head_dim=self._kv.shape[-1],
            programs=self._programs,
            window=window,
            sees=sees,
        )

    def _take(self, window: int | None, shape: Shape, *, kept: bool) -> Buffers:
        if not kept:
            return Buffers(shape, self._kv.device)
        key = window, shape
        # The one that was not used for longest goes first; a graph that still needs its memory holds it.
        found = self._kept.pop(key, None) or Buffers(shape, self._kv.device)
        self._kept[key] = found
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return found


def _segments(rows: Rows, *, shared: bool) -> tuple[Segments, Ints, npt.NDArray[np.int32] | None]:
    """What the rows read each for itself and, with ``shared``, together; each token's position; the trees' masks."""
    count, committed = len(rows.queries), rows.contexts - rows.queries
    positions = np.repeat(committed, rows.queries)
    positions += np.arange(len(positions)) - np.repeat(rows.starts, rows.queries)
    trees, sees = np.full(count, NO_TREE), None
    if rows.trees:
        words = -(-max(len(tree.depths) for tree in rows.trees.values()) // 32)
        sees = np.zeros((len(positions), words), np.int32)
    for row, tree in rows.trees.items():
        tokens = slice(int(rows.starts[row]), int(rows.starts[row] + rows.queries[row]))
        trees[row], positions[tokens] = committed[row], committed[row] + tree.depths
        assert sees is not None
        sees[tokens] = packed_bits(tree.sees, sees.shape[1])
    first, parts = share_prefixes(rows, committed // rows.page_size) if shared else (np.zeros(count, np.int64), [])
    size = rows.page_size
    own = Segments(
        rows=np.arange(count),
        counts=rows.queries,
        tokens=np.arange(len(positions)),
        begins=first * size,
        ends=rows.contexts,
        trees=trees,
        starts=rows.starts,
    )
    together = [
        shared_keys(int(part.rows[0]), rows.tokens(part.rows), part.page * size, part.page * size + part.tokens)
        for part in parts
    ]
    return joined([own, *together]), positions, sees
