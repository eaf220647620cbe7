"""Common parts of drafters that draft level by level on a GPU, where the host waits for nothing but the whole draft.

All that differs between two steps is on the device: tokens, positions, page tables and lengths. So what a level
computes depends on its padded number of branches alone, and one CUDA graph computes it for all levels and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.cache.paged_kv import KVCache
from engine.device import to_device
from engine.runner.graph_pool import GraphPool, Replay
from engine.sampling.gpu import apply_logits_processors_on_gpu
from engine.sampling.sampler import Ints
from engine.speculation.drafters.proposal import DraftSampler
from kernels.attention.draft import draft_attention, merge_table
from kernels.attention.kv_write import rotary_write, rotate
from kernels.common import warmup
from kernels.common.attention_schedule import count_busy_programs
from kernels.common.draft_keys import DraftKeys
from kernels.common.paged_keys import PagedKeys
from kernels.layers.norm import rms_norm

MAX_BRANCHES = 64
"""Maximum number of branches that draft together."""
MAX_DEPTH = 16
"""Maximum number of levels."""
_MAX_PARTS = 32
"""Maximum number of parts that the keys of a branch are cut into."""


def pad_branches(count: int) -> int:
    """Return the number of branches that ``count`` are padded to: few numbers, so that few graphs are captured."""
    return 1 << (count - 1).bit_length()


def list_sizes(max_branches: int) -> list[int]:
    """Return all padded numbers of up to ``max_branches`` branches."""
    return [1 << power for power in range(pad_branches(min(max_branches, MAX_BRANCHES)).bit_length())]


class RepeatedCalls:
    """Computations that are captured as CUDA graphs the second time they occur. Later ones are replays.

    Each computes from tensors that keep their addresses and writes its results to such tensors.
    """

    def __init__(self, *, can_capture: bool = True) -> None:
        self._can_capture = can_capture
        self._pool = GraphPool()
        self._graphs: dict[Hashable, Replay | None] = {}
        """Graphs by key; ``None``: the computation occurred once."""

    def __call__(self, key: Hashable, compute: Callable[[], Tensor]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph()
            return
        warmup.count_first_run()
        if not self._can_capture or key not in self._graphs:
            self._graphs[key] = None
            compute()
        else:
            graph, _ = self._pool.capture(compute)
            self._graphs[key] = graph
            graph()


class LevelAttention:
    """Attention of some layers to paged keys and values, with the page tables of the drafting branches."""

    def __init__(self, layers: Sequence[LayerAttentionConfig], cache: KVCache, which: Sequence[int]) -> None:
        """``which``: indices of the layers in the cache."""
        self._layers, self._cache = layers, cache
        self._stored = [cache.layer(index) for index in which]
        self.device = cache.data.device
        self._keys = [
            PagedKeys.of_layer(*stored, config.num_head_groups, config.num_values)
            for stored, config in zip(self._stored, layers, strict=True)
        ]
        columns = cache.page_table.shape[1]
        self.pages = torch.zeros(MAX_BRANCHES, columns, dtype=torch.int32, device=self.device)
        self._programs = count_busy_programs(self.device)
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def fill(self, rows: Sequence[int], num_tokens: int) -> None:
        """Copy the pages of up to ``num_tokens`` tokens of rows of the page table to the device."""
        columns = -(-num_tokens // self._cache.page_size)
        pages = self._cache.page_table[rows, :columns].astype(np.int32)
        self.pages[: len(rows), :columns].copy_(to_device(torch.from_numpy(pages), self.device))

    def slots(self, row: int, positions: Ints) -> Ints:
        """Return the slots of positions of a row of the page table."""
        page, offset = np.divmod(positions, self._cache.page_size)
        slots: Ints = self._cache.page_table[row, page] * self._cache.page_size + offset
        return slots

    def find_slots(self, positions: Tensor) -> Tensor:
        """Return the slots of one position of each branch, ``[branches]``, on the device."""
        size = self._cache.page_size
        return self.pages.gather(1, (positions // size)[:, None])[:, 0].long() * size + positions % size

    def write(self, layer: int, qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        """Rotate queries and keys, write keys and values, and return the queries; see ``rotary_write``."""
        kv, scales = self._stored[layer]
        return rotary_write(qk, v, cos=cos, sin=sin, slots=slots, cache=kv, scales=scales)

    def config(self, layer: int) -> LayerAttentionConfig:
        """Return the parameters of a layer's attention."""
        return self._layers[layer]

    def __call__(
        self, layer: int, q: Tensor, ends: Tensor, positions: Tensor, drafts: DraftKeys | None = None
    ) -> Tensor:
        """Return the attention ``[rows, heads * head_dim]`` of rows to ``ends`` ``[branches]`` tokens up to their
        ``positions`` ``[rows]``, and to the keys and values of draft tokens."""
        config, branches = self._layers[layer], len(ends)
        parts = max(1, min(_MAX_PARTS, self._programs // (branches * config.kv_heads))) + (drafts is not None)
        key = len(q), parts
        if key not in self._tables:
            self._tables[key] = merge_table(*key, self.device)
        own = DraftKeys(self._keys[layer], self.pages[:branches], ends, positions)
        mixed = draft_attention(
            q,
            own,
            drafts,
            *self._tables[key],
            scale=config.scale,
            window=config.window,
            softcap=config.softcap,
            sinks=config.sinks,
        )
        return mixed.flatten(1)


class LevelStep:
    """A ``FusedAttentionBackend`` of one level, which writes its keys and values into the cache."""

    def __init__(self, attention: LevelAttention, slots: Tensor, ends: Tensor, positions: Tensor) -> None:
        self._attention = attention
        self._slots, self._ends, self._positions = slots, ends, positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos = torch.ones(len(q), 2, device=q.device)  # a rotation by zero
        v = v[:, :0] if self._attention.config(layer).is_latent else v
        return self._attend(layer, torch.cat((q, k), dim=1), v=v, cos=cos, sin=torch.zeros_like(cos))

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        config = self._attention.config(layer)
        qk, v = qkv.tensor_split((config.heads + config.kv_heads,), dim=1)
        qk = qk if norm is None else rms_norm(qk, norm[: qk.shape[1]], eps)
        if qk.shape[1] == config.heads:
            return self._attention(layer, rotate(qk, cos, sin), self._ends, self._positions)
        return self._attend(layer, qk, v=v, cos=cos, sin=sin)

    def _attend(self, layer: int, qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self._attention.write(layer, qk, v=v, cos=cos, sin=sin, slots=self._slots)
        return self._attention(layer, q, self._ends, self._positions)


def change_logits(logits: Tensor, sampler: DraftSampler, branches: Sequence[int], size: int, ahead: int) -> None:
    """Apply the logits processors of ``branches`` to ``logits`` ``[size * rows, vocab]`` after ``ahead`` draft tokens.

    Penalties do not count draft tokens, which the host does not know yet, and grammars are left to the verification.
    """
    rows = len(logits) // size
    changes = [sampler.sequences[branch].logits_row((), ahead) for branch in branches for _ in range(rows)]
    apply_logits_processors_on_gpu(logits[: len(changes)], changes)
