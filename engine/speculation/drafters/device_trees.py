"""EAGLE's drafts on a GPU: trees that grow on the device, and one copy of all of them to the host.

The first level computes the entries of the branches' latest tokens into their pages. The entries of draft tokens have
places of their own, with as many rows in each level as one can have nodes: the values of a level's nodes are at most 1
in all, and so at most ``1 / FLOOR`` are expanded. A tree is that of ``tree_draft``, except that penalties do not count
its draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.cache.paged_kv import KVCache
from engine.device import to_device
from engine.sampling.sampler import Ints
from engine.scheduler.draft import Draft
from engine.speculation.drafter import DraftRequest
from engine.speculation.drafters import tree_draft
from engine.speculation.drafters.device_levels import (
    MAX_BRANCHES,
    MAX_DEPTH,
    LevelAttention,
    LevelStep,
    RepeatedCalls,
    change_logits,
    list_sizes,
    pad_branches,
)
from engine.speculation.drafters.draft_entries import Span
from engine.speculation.drafters.draft_layer import DraftLayer
from engine.speculation.drafters.proposal import DraftSampler, candidate_rules
from kernels.attention.kv_write import rotary_write
from kernels.common.draft_keys import DraftKeys
from kernels.common.draft_trees import NODES, TreeBuffers
from kernels.common.paged_keys import PagedKeys
from kernels.sampling.draft_tree import grow, rank_drafts

_ENDS = 8
"""Maximum number of a branch's stop tokens that are not expanded."""
_FLOATS, _INTS, _PARAMS, _LAST = slice(0, 3), slice(3, 7), slice(7, 11 + _ENDS), 11 + _ENDS
_END = 10
"""Rows of a step's inputs: parameters of the sampling, ``TreeBuffers.params``, the number of a branch's entries among
them, and the row of its last one in the first level."""


class EagleTrees:
    """Drafts of an EAGLE layer over the last layer of the target's cache."""

    def __init__(self, layer: DraftLayer, cache: KVCache, waiting: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """``waiting``: ``[rows, any, state_size]`` states without entries; ``angles``: rotary tables."""
        self._layer, self._angles, self._max_branches = layer, angles, len(cache.page_table)
        self._max_first, self._waiting = waiting.shape[1], waiting.flatten(0, 1)
        last = sum(len(pool.layers) for pool in cache.pools) - 1
        self._attention = LevelAttention([layer.layer_config], cache, [last])
        device = self._attention.device
        self._inputs = torch.zeros(_LAST + 1, MAX_BRANCHES, dtype=torch.int64, device=device)
        self._first_rows = torch.zeros(4, MAX_BRANCHES * self._max_first, dtype=torch.int64, device=device)
        """State, token, position and slot of each row of the first level."""
        self._trees: dict[int, _Trees] = {}
        """Trees by the number of rows of a level."""
        self._calls = RepeatedCalls()

    def __call__(self, requests: Sequence[DraftRequest], spans: Sequence[Span]) -> list[Draft]:
        """Return a draft for each request. ``spans``: their latest tokens, whose states are waiting."""
        groups = [slice(start, start + MAX_BRANCHES) for start in range(0, len(requests), MAX_BRANCHES)]
        found = [self._draft(requests[group], spans[group]) for group in groups]
        # The only copy to the host.
        trees = torch.cat(found).cpu().numpy()
        return [_read_draft(tree) for tree in trees]

    def warm_ups(self) -> list[Callable[[], None]]:
        """Return ``Drafter.warm_ups``: drafts of branches that are padding."""
        lengths = [1 << power for power in range(self._max_first.bit_length())]
        shapes = product(list_sizes(self._max_branches), lengths, (1, _get_max_expanded()))
        return [partial(self._warm_up, *shape) for shape in shapes]

    def _warm_up(self, size: int, num_first: int, wide: int) -> None:
        self._inputs.zero_()
        self._first_rows.zero_()
        self._first_rows[3] = -1
        self._run_levels(size, num_first, wide, 2)

    def _draft(self, requests: Sequence[DraftRequest], spans: Sequence[Span]) -> Tensor:
        sampler = DraftSampler([request.sequence for request in requests])
        size, longest = pad_branches(len(requests)), max(span.length for span in spans)
        num_first = 1 << (longest - 1).bit_length()
        self._fill(requests, spans, sampler=sampler, size=size, num_first=num_first)
        wide = 1 if all(request.nodes == request.depth for request in requests) else _get_max_expanded()
        depth = min(MAX_DEPTH, max(request.depth for request in requests))
        trees = self._run_levels(
            size, num_first, wide=wide, depth=depth, processors=sampler if sampler.has_processors else None
        )
        return trees[: len(requests)].clone()

    def _run_levels(
        self, size: int, num_first: int, wide: int, depth: int, processors: DraftSampler | None = None
    ) -> Tensor:
        """Compute ``depth`` levels; return the trees ``[size, …]``, valid until the next call."""
        if wide not in self._trees:
            layer_config, dtype = self._layer.layer_config, self._waiting.dtype
            self._trees[wide] = _Trees(layer_config, wide, self._attention.device, dtype)
        trees = self._trees[wide]
        buffers = trees.buffers(size, self._inputs)
        for level in range(depth):

            def compute(level: int = level) -> Tensor:
                is_first = level == 0
                predicted = self._compute_first(size, num_first) if is_first else self._compute_level(trees, buffers)
                trees.store(predicted, is_first=is_first)
                logits = self._layer.compute_logits(predicted)
                if processors is not None:
                    change_logits(logits, processors, branches=range(len(processors.sequences)), size=size, ahead=level)
                self._grow(logits, buffers, is_first=is_first)
                return buffers.tree

            if processors is not None:
                compute()
            else:
                self._calls((size, wide, num_first if level == 0 else 0), compute)
        return buffers.tree

    def _compute_first(self, size: int, num_first: int) -> Tensor:
        """Compute the entries of the waiting states into the pages; return each branch's last feature."""
        states, tokens, positions, slots = self._first_rows[:, : size * num_first]
        features = self._layer.fuse(self._waiting[states])
        step = LevelStep(
            self._attention,
            slots=slots,
            ends=self._inputs[_END, :size],
            positions=positions,
        )
        angles = self._get_angles(positions)
        predicted = self._layer(features, self._layer.embed(tokens), angles, lambda q, k, v: step(0, q, k, v))
        return predicted[self._inputs[_LAST, :size]]

    def _compute_level(self, trees: _Trees, buffers: TreeBuffers) -> Tensor:
        """Compute the features after the latest level's rows."""
        size, config = buffers.branches, self._layer.layer_config

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cos = torch.ones(len(q), 2, device=q.device)  # a rotation by zero
            q = rotary_write(
                torch.cat((q, k), dim=1),
                v if config.shape.has_values else v[:, :0],
                cos=cos,
                sin=torch.zeros_like(cos),
                slots=buffers.slots,
                cache=trees.entries,
            )
            pages, positions = trees.pages[:size], buffers.positions
            entries = PagedKeys.of_layer(trees.entries, None, config.num_head_groups, config.num_values)
            drafts = DraftKeys(entries, pages, ends=buffers.ends, positions=positions, sees=buffers.sees)
            return self._attention(0, q, self._inputs[_END, :size], positions, drafts=drafts)

        features, embedded = trees.read(buffers), self._layer.embed(buffers.row_tokens)
        # Padding may be behind the end of the context.
        positions = buffers.positions.clamp_max(len(self._angles[0]) - 1)
        return self._layer(features, embedded, self._get_angles(positions), attend)

    def _grow(self, logits: Tensor, buffers: TreeBuffers, *, is_first: bool) -> None:
        size = buffers.branches
        floats, ints = self._inputs[_FLOATS, :size].view(torch.float64), self._inputs[_INTS, :size]
        ahead = torch.zeros_like(buffers.level) if is_first else buffers.level
        width = 1 if buffers.wide == 1 else tree_draft.WIDTH
        tokens, probs = rank_drafts(logits, floats, ints=ints, ahead=ahead, width=width, rules=candidate_rules())
        grow(tokens, probs, buffers, tree_draft.FLOOR, is_first=is_first)

    def _fill(
        self, requests: Sequence[DraftRequest], spans: Sequence[Span], sampler: DraftSampler, size: int, num_first: int
    ) -> None:
        """Copy a draft's inputs to the device; branches behind the requests are padding, without nodes."""
        inputs = np.zeros((_LAST + 1, MAX_BRANCHES), np.int64)
        inputs[11 : 11 + _ENDS] = -1
        inputs[_LAST, :size] = np.arange(size) * num_first
        first_rows = np.zeros((4, size, num_first), np.int64)
        first_rows[3] = -1
        count = len(requests)
        inputs[_FLOATS, :count] = np.ascontiguousarray(sampler.float_params).view(np.int64)
        inputs[_INTS, :count] = sampler.int_params
        for index, (request, span) in enumerate(zip(requests, spans, strict=True)):
            sequence, (table, first, length) = request.sequence, span
            positions = np.arange(first, first + length)
            ends = sorted(sequence.terminal_tokens)[:_ENDS]
            numbers = min(request.nodes, NODES), request.depth, request.nodes == request.depth, first + length, *ends
            inputs[7 : 7 + len(numbers), index] = numbers
            inputs[_LAST, index] += length - 1
            first_rows[0, index, :length] = table.row * self._max_first + np.arange(length)
            first_rows[1, index, :length] = sequence.tokens[first + 1 : first + 1 + length]
            first_rows[2, index, :length] = positions
            first_rows[3, index, :length] = self._attention.slots(table.row, positions)
        device = self._attention.device
        self._inputs.copy_(to_device(torch.from_numpy(inputs), device))
        rows = to_device(torch.from_numpy(first_rows.reshape(4, -1)), device)
        self._first_rows[:, : size * num_first].copy_(rows)
        self._attention.fill([span.table.row for span in spans], max(span.first + span.length for span in spans))

    def _get_angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._angles
        return cos[positions], sin[positions]


class _Trees:
    """Buffers of trees whose levels have ``wide`` rows a branch."""

    def __init__(self, layer_config: LayerAttentionConfig, wide: int, device: torch.device, dtype: torch.dtype) -> None:
        self._wide, self._room = wide, wide * MAX_DEPTH
        rows = MAX_BRANCHES * wide
        kinds = layer_config.shape.num_kinds
        shape = kinds, layer_config.kv_heads, MAX_BRANCHES, self._room, layer_config.head_dim
        self.entries = torch.zeros(shape, dtype=dtype, device=device)
        """Keys and values of draft tokens, a page for each branch."""
        self.pages = torch.arange(MAX_BRANCHES, dtype=torch.int32, device=device)[:, None]
        self._ints = torch.zeros(5, rows, dtype=torch.int64, device=device)
        self._counts = torch.zeros(2, MAX_BRANCHES, dtype=torch.int64, device=device)
        self._sees = torch.zeros(rows, -(-self._room // 32), dtype=torch.int32, device=device)
        self._tree = torch.zeros(MAX_BRANCHES, 3 * NODES + 1, dtype=torch.int64, device=device)
        self._values = torch.zeros(MAX_BRANCHES, NODES, dtype=torch.float64, device=device)
        self._predicted: Tensor | None = None

    def buffers(self, size: int, inputs: Tensor) -> TreeBuffers:
        """Return the trees of the first ``size`` branches, whose parameters are in ``inputs``."""
        row_nodes, parent_rows, row_tokens, positions, slots = self._ints[:, : size * self._wide]
        level, ends = self._counts[:, :size]
        return TreeBuffers(
            params=inputs[_PARAMS, :size],
            tree=self._tree[:size],
            values=self._values[:size],
            row_nodes=row_nodes,
            level=level,
            ends=ends,
            parent_rows=parent_rows,
            row_tokens=row_tokens,
            positions=positions,
            slots=slots,
            sees=self._sees[: size * self._wide],
            wide=self._wide,
            room=self._room,
        )

    def store(self, predicted: Tensor, *, is_first: bool) -> None:
        """Keep the features that a level predicted, one row for each branch if it is the first."""
        if self._predicted is None:  # in a first run, which is never captured
            self._predicted = predicted.new_zeros(MAX_BRANCHES * self._wide, predicted.shape[1])
        step = self._wide if is_first else 1
        self._predicted[: len(predicted) * step : step] = predicted

    def read(self, buffers: TreeBuffers) -> Tensor:
        """Return the features that the latest level's rows continue."""
        assert self._predicted is not None
        return self._predicted[buffers.parent_rows]


def _get_max_expanded() -> int:
    """Return the maximum number of expanded nodes of a level."""
    return min(NODES, int(1 / tree_draft.FLOOR)) if tree_draft.FLOOR > 1 / NODES else 24


def _read_draft(tree: Ints) -> Draft:
    count = int(tree[-1])
    tokens, parents, probs = tree[:-1].reshape(3, NODES)[:, :count]
    return Draft(tuple(tokens.tolist()), tuple(parents.tolist()), tuple(probs.view(np.float64).tolist()))
