"""Paged attention on the CPU, one compiled kernel per layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig, Span
from engine.attention.plan import AttentionMetadata, IntArray
from kernels.cpu.attention.keys import CACHE_TYPES, STEP_WORDS
from kernels.cpu.attention.paged import attend, max_tile_tokens, scratch_size
from kernels.cpu.attention.plan import plan_size, plan_step
from kernels.cpu.attention.rotary_write import rotary_write
from kernels.cpu.attention.sinks import scale_by_sinks
from kernels.cpu.runtime.recorder import empty

_ONE_THREAD_NUMBERS = 1 << 14
"""Numbers up to which one thread rotates faster than several start."""
_ONE_THREAD_PRODUCTS = 1 << 20
"""Products of queries and keys up to which one thread attends faster than several start."""


class _KernelLauncher(ABC):
    """Launches of a layer's kernels, which read the step's description (``STEP_WORDS`` words) at an address."""

    def __init__(self, layers: Sequence[LayerAttentionConfig], kv: Tensor, scales: Tensor | None) -> None:
        self._layers = layers
        self._kv, self._kind = list(kv), CACHE_TYPES[kv.dtype]
        self._scales: list[Tensor | int] = [0] * len(self._kv) if scales is None else list(scales)
        # A page of several blocks of sixteen tokens is as many pages for the kernel, which then need not divide.
        self._blocks_per_page = 1 if kv.shape[4] % 16 else kv.shape[4] // 16
        self._page_size = kv.shape[4] // self._blocks_per_page
        self._capacity = kv.shape[3] * kv.shape[4]
        self._no_angles = torch.empty(0, 0)

    @abstractmethod
    def _describe_step(self, layer: int, num_tokens: int) -> tuple[int, int]:
        """Return the address of the step's description, and the number of threads."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv = torch.cat((q, k) if self._layers[layer].is_latent else (q, k, v), dim=1)
        return self.forward_qkv(layer, qkv, norm=None, eps=0.0, cos=self._no_angles, sin=self._no_angles)

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        config = self._layers[layer]
        num_tokens, num_vectors, _ = qkv.shape
        step, threads = self._describe_step(layer, num_tokens)
        kv, scales = self._kv[layer], self._scales[layer]
        heads, head_dim, groups = config.heads, config.head_dim, config.num_head_groups
        to_next_head, to_values = self._capacity, self._capacity * config.kv_heads
        if config.is_latent:
            to_next_head = to_values = 0
        rotary_write(
            qkv,
            0 if norm is None else norm,
            eps,
            cos,
            sin,
            step,
            kv,
            scales,
            self._kind,
            num_tokens,
            heads,
            min(config.kv_heads, num_vectors - heads),
            num_vectors,
            head_dim,
            cos.shape[1],
            self._capacity,
            threads=1 if qkv.numel() < _ONE_THREAD_NUMBERS else threads,
        )
        out = empty(num_tokens, heads * head_dim)
        attend(
            qkv,
            kv,
            scales,
            self._kind,
            out,
            step,
            heads,
            groups,
            num_vectors,
            head_dim,
            to_next_head,
            to_values,
            self._page_size,
            threads // math.gcd(threads, groups),
            config.scale,
            config.softcap or 0.0,
            threads=threads,
        )
        if config.sinks is not None:
            scale_by_sinks(out, step, config.sinks, num_tokens, heads, head_dim, threads=1)
        return out


class RecordableAttention(_KernelLauncher):
    """A ``FusedAttentionBackend`` for a step in a recorded kernel sequence, which is replayed with other tokens.

    Every token reads all keys of its row, up to its own, and shares none. ``plan`` ``[3, tokens]`` int64 holds each
    token's row of the page table, its number of keys, and the slot that its own key and value are written to.
    """

    def __init__(
        self,
        layers: Sequence[LayerAttentionConfig],
        kv: Tensor,
        scales: Tensor | None,
        page_table: IntArray,
        plan: Tensor,
        *,
        max_keys: int,
    ) -> None:
        """``page_table``: ``[rows, columns]``, of pages of 16 tokens or no multiple of 16. ``max_keys``: most keys of a
        token. No layer has a window. For the others see ``NumbaAttention``."""
        super().__init__(layers, kv, scales)
        config, tokens = layers[0], plan.shape[1]
        work = tokens * config.heads * config.head_dim * max_keys
        self._threads = 1 if work < _ONE_THREAD_PRODUCTS else torch.get_num_threads()
        self._page_table, self._plan, self._max_keys = page_table, plan, max_keys
        self._zeros, self._no_tree = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), -1)
        """First key, and offset of the tree mask, of every token."""
        self._steps: list[Tensor] = []
        """Descriptions of the steps, kept because a recorded kernel sequence holds their addresses."""

    def _describe_step(self, layer: int, num_tokens: int) -> tuple[int, int]:
        config = self._layers[layer]
        scratch_stride = scratch_size(config.head_dim, config.heads // config.num_head_groups, self._max_keys)
        scratch, states = empty(self._threads * scratch_stride), empty(2 * num_tokens * config.heads)
        rows, ends, slots = (part.data_ptr() for part in self._plan)
        first, no_tree, pages = self._zeros.data_ptr(), self._no_tree.data_ptr(), self._page_table.ctypes.data
        # The order of these words is that of ``kernels.cpu.attention.paged.attend``.
        words = (scratch.data_ptr(), pages, rows, first, ends, first, no_tree, first, first, first)
        counts = num_tokens, self._page_table.shape[1], 0, self._max_keys, scratch_stride
        step = torch.tensor([*words, states.data_ptr(), *counts, slots], dtype=torch.int64)
        self._steps.append(step)
        return step.data_ptr(), self._threads


class NumbaAttention(_KernelLauncher):
    """A ``FusedAttentionBackend`` for the CPU.

    With ``sharing`` a prefix that several branches have in common is read once for all of them, and the beginning of a
    prompt once for many of its tokens. Without it each token reads its own keys, always in the same order, so that a
    token's result is, bit for bit, a function of its sequence alone.
    """

    def __init__(
        self, layers: Sequence[LayerAttentionConfig], kv: Tensor, scales: Tensor | None = None, *, sharing: bool = True
    ) -> None:
        """``kv``: ``[layers, kinds, kv_heads, pages, page_size, head_dim]``, float32, or quantized with ``scales``, see
        ``KeyPool``; ``head_dim`` a multiple of 16."""
        super().__init__(layers, kv, scales)
        self._sharing = sharing
        self._spans = list(dict.fromkeys(layer.span for layer in layers))
        self._scratch = self._states = torch.empty(0)
        self._trees: dict[Span, list[Tensor]] = {}
        self._plan_buffers = {span: torch.empty(0, dtype=torch.int64) for span in self._spans}
        self._steps = {span: torch.zeros(STEP_WORDS, dtype=torch.int64) for span in self._spans}
        """Descriptions of the prepared step for ``attend``, at addresses that stay the same."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._threads = torch.get_num_threads()
        (num_rows, columns), config = metadata.page_table.shape, self._layers[0]
        per_kv = config.heads // config.num_head_groups
        tokens, tile = int(metadata.query_lens.sum()), max_tile_tokens(per_kv)
        scratch_stride = scratch_size(config.head_dim, per_kv, columns * metadata.page_size)
        self._scratch = _grow(self._scratch, scratch_stride * self._threads)
        self._states = _grow(self._states, 2 * tokens * config.heads)
        num_words = plan_size(num_rows, tokens, num_rows * columns * self._blocks_per_page, tile)
        arrays = metadata.page_table, metadata.query_lens, metadata.seq_lens
        page_table, query_lens, seq_lens = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
        token_cost, piece_cost, query_cost = metadata.cost_model.as_bytes
        for span, step in self._steps.items():
            buffer = self._plan_buffers[span] = _grow(self._plan_buffers[span], num_words)
            trees = self._trees[span] = [torch.from_numpy(array) for array in _flatten_trees(metadata, span)]
            offsets, depths, masks = trees or (0, 0, 0)
            plan_step(
                step,
                buffer,
                page_table,
                query_lens,
                seq_lens,
                offsets,
                depths,
                masks,
                self._scratch,
                self._states,
                num_rows,
                tokens,
                columns,
                self._blocks_per_page,
                metadata.page_size,
                span.window or 0,
                int(self._sharing),
                tile,
                token_cost,
                piece_cost,
                query_cost,
                scratch_stride,
                span.chunk or 0,
                threads=1,
            )

    def _describe_step(self, layer: int, num_tokens: int) -> tuple[int, int]:  # noqa: ARG002
        return self._steps[self._layers[layer].span].data_ptr(), self._threads


def _grow(buffer: Tensor, size: int) -> Tensor:
    """Return ``buffer`` if it holds ``size`` numbers, else a new one with room for twice as many."""
    return buffer if buffer.shape[0] >= size else torch.empty(2 * size, dtype=buffer.dtype)


def _flatten_trees(metadata: AttentionMetadata, span: Span) -> tuple[npt.NDArray[np.generic], ...]:
    """Return ``[rows, 2]`` offsets of each row's tree in masks and depths, or -1; all trees' depths; all their masks.

    Return nothing if there are no trees.
    """
    if not metadata.tree_masks:
        return ()
    offsets, depths, masks = np.full((len(metadata.query_lens), 2), -1), [], []
    mask_offset = depth_offset = 0
    for row, tree in metadata.tree_masks.items():
        offsets[row] = mask_offset, depth_offset
        mask_offset, depth_offset = mask_offset + tree.visible.size, depth_offset + len(tree.depths)
        depths.append(tree.depths)
        positions = tree.depths + int(metadata.seq_lens[row] - metadata.query_lens[row])
        first_keys = np.array([span.first_key(int(position)) for position in positions])
        masks.append((tree.visible & (positions >= first_keys[:, None])).reshape(-1))
    return offsets, np.concatenate(depths), np.concatenate(masks)
