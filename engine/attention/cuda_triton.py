"""Paged attention on a GPU, one kernel launch for all rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.attention.plan import AttentionMetadata, IntArray, SharedPrefix, find_shared_prefixes
from kernels.attention.kv_write import rotary_write, rotate
from kernels.attention.paged import paged_attention
from kernels.common.attention_schedule import (
    NO_TREE,
    AttentionTiles,
    Segments,
    TileBuffers,
    TilePlan,
    TileShape,
    concat_segments,
    count_busy_programs,
    pack_bits,
    plan_tiles,
    shared_prefix_segment,
)
from kernels.common.int4 import INT4
from kernels.common.paged_keys import PagedKeys
from kernels.cpu.attention.decode_tiles import DecodeTilePlanner
from kernels.layers.norm import rms_norm

_MAX_LATENT_HEADS = 64
"""Query heads of one tile that read latents of 16 bits. Others need more registers: half as many read float32 and 8
bits, a quarter 4 bits."""
_MAX_KEPT_BUFFERS = 128
"""Sets of buffers kept for steps of the same shape."""
MAX_REPEATABLE_QUERIES = 25
"""New tokens of a row up to which a step's shape is expected again: one, and the largest tree of draft tokens."""


class TritonAttention:
    """A ``FusedAttentionBackend`` for a GPU.

    ``prepare`` builds all index tensors once a step and copies them without waiting; the layers then only launch
    kernels. The index tensors of ``is_repeatable`` steps keep their addresses: a CUDA graph captured from one such step
    computes every other step with the same ``buffers``.
    """

    def __init__(
        self,
        layers: Sequence[LayerAttentionConfig],
        kv: Tensor,
        scales: Tensor | None = None,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        """``kv``: ``[layers, kinds, kv_heads, pages, page_size, head_dim]``, keys before values. For quantized
        ``kv`` with ``scales`` see ``KeyPool``. ``is_batch_invariant``: a token's result is, bit for bit, a function of
        its sequence alone; steps have no trees then."""
        self._layers = layers
        self._is_batch_invariant = is_batch_invariant
        self._kv, self._scales = kv, scales
        layer = layers[0]
        self._groups = _count_groups(layer, kv.dtype)
        self._heads_per_group = layer.heads // self._groups
        self._has_small_tiles = kv.dtype == torch.float32 or (layer.is_latent and scales is not None)
        self._caches = [
            PagedKeys.of_layer(own, None if scales is None else scales[index], self._groups, layer.num_values)
            for index, own in enumerate(kv)
        ]
        self._windows = list(dict.fromkeys(layer.window for layer in layers))
        self._programs = count_busy_programs(kv.device)
        self._decode_planner = DecodeTilePlanner(
            heads_per_kv=self._heads_per_group,
            kv_heads=self._groups,
            head_dim=kv.shape[-1],
            programs=self._programs,
            is_float32=self._has_small_tiles,
        )
        self._kept: dict[tuple[int | None, TileShape], TileBuffers] = {}
        self._work: dict[int | None, AttentionTiles] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Plan a step and copy the plan to the device."""
        self.is_repeatable = int(metadata.query_lens.max()) <= MAX_REPEATABLE_QUERIES
        """True if every row of the prepared step has few new tokens."""
        self.buffers = tuple(self._fill_buffers(metadata, window) for window in self._windows)
        """Index tensors of the prepared step. Their shapes bound the number of tokens of a batch."""
        self._work = {window: buffers.work for window, buffers in zip(self._windows, self.buffers, strict=True)}
        self._slots = self.buffers[0].work.slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos = torch.ones(len(q), 2, device=q.device)  # a rotation by zero
        v = v[:, :0] if self._layers[layer].is_latent else v
        return self._rotate_and_attend(layer, torch.cat((q, k), dim=1), v=v, cos=cos, sin=torch.zeros_like(cos))

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        config = self._layers[layer]
        qk, v = qkv.tensor_split((config.heads + config.kv_heads,), dim=1)
        qk = qk if norm is None else rms_norm(qk, norm[: qk.shape[1]], eps)
        if qk.shape[1] == config.heads:
            return self._attend(layer, rotate(qk, cos, sin))
        return self._rotate_and_attend(layer, qk, v=v, cos=cos, sin=sin)

    def _rotate_and_attend(self, layer: int, qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate queries and keys ``[tokens, heads + kv_heads, head_dim]`` and attend.

        ``cos`` and ``sin``: ``[tokens, dim]`` float32, see ``rotary_tables``. Tokens behind the step's own are padding:
        nothing of them is written, and their results are undefined.
        """
        scales = None if self._scales is None else self._scales[layer]
        q = rotary_write(qk, v, cos=cos, sin=sin, slots=self._slots[: len(qk)], cache=self._kv[layer], scales=scales)
        return self._attend(layer, q)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        """Return the attention of rotated queries to what is in the cache."""
        config = self._layers[layer]
        out = paged_attention(
            q,
            self._caches[layer],
            self._work[config.window],
            scale=config.scale,
            window=config.window,
            softcap=config.softcap,
            sinks=config.sinks,
            merges_in_order=self._is_batch_invariant,
        )
        return out.flatten(1)

    def _fill_buffers(self, metadata: AttentionMetadata, window: int | None) -> TileBuffers:
        plan = self._plan(metadata, window)
        shape = TileShape.of(plan, rounded=self.is_repeatable)
        buffers = self._take_buffers(window, shape, is_kept=self.is_repeatable)
        buffers.fill(plan)
        return buffers

    def _plan(self, metadata: AttentionMetadata, window: int | None) -> TilePlan:
        if metadata.is_decode and not self._is_batch_invariant:
            return self._decode_planner.plan(
                metadata.page_table,
                metadata.seq_lens,
                metadata.page_size,
                costs=metadata.cost_model.as_bytes,
                window=window,
            )
        segments, positions, sees = _build_segments(
            metadata, should_share=window is None and not self._is_batch_invariant
        )
        num_columns = -(-int(metadata.seq_lens.max()) // metadata.page_size)
        return plan_tiles(
            segments,
            metadata.page_table[:, :num_columns],
            positions,
            metadata.slots,
            heads_per_kv=self._heads_per_group,
            kv_heads=self._groups,
            head_dim=self._layers[0].head_dim,
            programs=self._programs,
            is_float32=self._has_small_tiles,
            window=window,
            sees=sees,
            is_batch_invariant=self._is_batch_invariant,
        )

    def _take_buffers(self, window: int | None, shape: TileShape, *, is_kept: bool) -> TileBuffers:
        if not is_kept:
            return TileBuffers(shape, self._kv.device)
        key = window, shape
        # The least recently used ones are dropped first; a graph that still needs their memory holds it.
        buffers = self._kept.pop(key, None) or TileBuffers(shape, self._kv.device)
        self._kept[key] = buffers
        if len(self._kept) > _MAX_KEPT_BUFFERS:
            del self._kept[next(iter(self._kept))]
        return buffers


def _count_groups(layer: LayerAttentionConfig, dtype: torch.dtype) -> int:
    """Return the groups of query heads that are computed apart: those that share keys, and of those that all read one
    vector a token no more than a tile holds."""
    if not layer.is_latent:
        return layer.kv_heads
    most = _MAX_LATENT_HEADS if dtype.itemsize == 2 else _MAX_LATENT_HEADS // (4 if dtype == INT4 else 2)
    return next(
        count for count in range(1, layer.heads + 1) if layer.heads % count == 0 and layer.heads // count <= most
    )


def _build_segments(
    metadata: AttentionMetadata, *, should_share: bool
) -> tuple[Segments, IntArray, npt.NDArray[np.int32] | None]:
    """Return the segments of a step, each flat token's position, and the bit masks of the trees.

    Every row reads its own keys; with ``should_share`` rows read the prefixes they have in common together.
    """
    query_lens, page_size = metadata.query_lens, metadata.page_size
    num_rows, num_computed, starts = len(query_lens), metadata.seq_lens - query_lens, metadata.query_starts
    positions = np.repeat(num_computed, query_lens)
    positions += np.arange(len(positions)) - np.repeat(starts, query_lens)
    trees, sees = np.full(num_rows, NO_TREE), None
    if metadata.tree_masks:
        num_words = -(-max(len(tree.depths) for tree in metadata.tree_masks.values()) // 32)
        sees = np.zeros((len(positions), num_words), np.int32)
    for row, tree in metadata.tree_masks.items():
        own_tokens = slice(int(starts[row]), int(starts[row] + query_lens[row]))
        trees[row], positions[own_tokens] = num_computed[row], num_computed[row] + tree.depths
        assert sees is not None
        sees[own_tokens] = pack_bits(tree.visible, sees.shape[1])
    own_first_page, shared = np.zeros(num_rows, np.int64), list[SharedPrefix]()
    if should_share:
        own_first_page, shared = find_shared_prefixes(metadata, num_computed // page_size)
    own = Segments(
        rows=np.arange(num_rows),
        counts=query_lens,
        tokens=np.arange(len(positions)),
        begins=own_first_page * page_size,
        ends=metadata.seq_lens,
        trees=trees,
        starts=starts,
    )
    segments = [own]
    for prefix in shared:
        begin = prefix.first_page * page_size
        tokens = metadata.flat_tokens(prefix.rows)
        segments.append(shared_prefix_segment(int(prefix.rows[0]), tokens, begin, begin + prefix.num_tokens))
    return concat_segments(segments), positions, sees
