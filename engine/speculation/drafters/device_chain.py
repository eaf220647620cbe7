"""Chains of a draft model on a GPU: its tokens stay there between levels, and are copied to the host once.

The first level computes up to ``DUE`` latest tokens of each branch, each later one the best draft token of the one
before. Penalties do not count draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.device import to_device
from engine.models.decoder import Decoder
from engine.models.interface import Batch, Model
from engine.sampling.sampler import Floats, Ints
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
from engine.speculation.drafters.fused_chain import DUE, ChainStart
from engine.speculation.drafters.proposal import DraftSampler, candidate_rules
from kernels.sampling.draft_tree import rank_drafts

_FLOATS, _INTS, _POSITION, _END = slice(0, 3), slice(3, 7), 6, 7
"""Rows of a step's inputs: parameters of the sampling, the position of the first draft token among them, and the number
of a branch's tokens; padding has none."""

_LEAST_WIDE = 8
"""Candidates of each level if there are runners-up, or a power of two above."""


class DeviceChains:
    """Chains of one model over one cache."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._max_branches = model, len(cache.page_table)
        self._attention = LevelAttention(model.config.attention, cache, range(len(model.config.attention)))
        self._device = self._attention.device
        self._inputs = torch.zeros(_END + 1, MAX_BRANCHES, dtype=torch.int64, device=self._device)
        self._due = torch.zeros(3, MAX_BRANCHES * DUE, dtype=torch.int64, device=self._device)
        """Token, position and slot of each row of the first level."""
        self._level = torch.zeros(MAX_BRANCHES, dtype=torch.int64, device=self._device)
        self._best = torch.zeros(MAX_BRANCHES, dtype=torch.int64, device=self._device)
        """Best draft tokens of the latest level."""
        self._found: dict[int, Tensor] = {}
        """Tokens and the bits of their probabilities ``[2, MAX_DEPTH, MAX_BRANCHES, width]`` by their width."""
        self._calls = RepeatedCalls(can_capture=isinstance(model, Decoder) and model.is_capturable)

    def __call__(
        self, starts: Sequence[ChainStart], sampler: DraftSampler, depth: int, width: int
    ) -> tuple[Ints, Floats]:
        """Return tokens and probabilities ``[depth, branches, width or more]``: ``FusedChains``."""
        width = width if width == 1 else max(_LEAST_WIDE, 1 << (width - 1).bit_length())  # few numbers, few graphs
        groups = [range(first, len(starts))[:MAX_BRANCHES] for first in range(0, len(starts), MAX_BRANCHES)]
        found = torch.cat(
            [self._draft(starts, group, sampler=sampler, depth=depth, width=width) for group in groups], dim=2
        )
        # The only copy to the host.
        tokens, probs = found.cpu().numpy()
        return tokens, probs.view(np.float64)

    def warm_ups(self) -> list[Callable[[], None]]:
        """Return ``Drafter.warm_ups``: chains of branches that are padding."""
        return [partial(self._warm_up, *shape) for shape in product(list_sizes(self._max_branches), (1, _LEAST_WIDE))]

    def _warm_up(self, size: int, width: int) -> None:
        self._inputs.zero_()
        self._due.zero_()
        self._due[2] = -1
        for level in range(2):
            self._run_level(size, width, level=level, processors=None, group=range(0))

    def _draft(
        self, starts: Sequence[ChainStart], group: range, sampler: DraftSampler, depth: int, width: int
    ) -> Tensor:
        size = pad_branches(len(group))
        self._fill([starts[index] for index in group], sampler, group=group, size=size, depth=depth)
        for level in range(depth):
            self._run_level(
                size, width, level=level, processors=sampler if sampler.has_processors else None, group=group
            )
        return self._found[width][:, :depth, : len(group)].clone()

    def _run_level(self, size: int, width: int, level: int, processors: DraftSampler | None, group: range) -> None:
        """Compute a level of ``size`` branches."""
        if width not in self._found:
            shape = 2, MAX_DEPTH, MAX_BRANCHES, width
            self._found[width] = torch.zeros(shape, dtype=torch.int64, device=self._device)
        found, number = self._found[width], self._level[:size]

        def compute() -> Tensor:
            hidden = self._compute_due(size) if level == 0 else self._compute_next(size)
            logits = self._model.compute_logits(hidden)
            if processors is not None:
                change_logits(logits, processors, branches=group, size=size, ahead=level)
            if level == 0:
                number.zero_()
            floats, ints = self._inputs[_FLOATS, :size].view(torch.float64), self._inputs[_INTS, :size]
            tokens, probs = rank_drafts(logits, floats, ints=ints, ahead=number, width=width, rules=candidate_rules())
            both = torch.stack((tokens, probs.view(torch.int64)))
            found[:, :, :size].index_copy_(1, number[:1], both[:, None])
            self._best[:size] = tokens[:, 0]
            number.add_(1)
            return found

        if processors is not None:
            compute()
        else:
            self._calls((size, width, level == 0), compute)

    def _compute_due(self, size: int) -> Tensor:
        tokens, positions, slots = self._due[:, : size * DUE]
        hidden = self._forward(tokens, positions, slots, self._inputs[_END, :size])
        return hidden.view(size, DUE, -1)[:, -1]

    def _compute_next(self, size: int) -> Tensor:
        end = self._inputs[_END, :size]
        exists = end > 0
        positions = torch.where(exists, end + self._level[:size] - 1, 0)
        slots = torch.where(exists, self._attention.find_slots(positions), -1)
        return self._forward(self._best[:size], positions, slots, torch.where(exists, positions + 1, 0))

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        step = LevelStep(self._attention, slots=slots, ends=ends, positions=positions)
        return self._model.forward(Batch(tokens, positions), step)

    def _fill(self, starts: Sequence[ChainStart], sampler: DraftSampler, group: range, size: int, depth: int) -> None:
        """Copy a draft's inputs to the device."""
        inputs = np.zeros((_END + 1, MAX_BRANCHES), np.int64)
        count, places = len(starts), slice(group.start, group.stop)
        inputs[_FLOATS, :count] = np.ascontiguousarray(sampler.float_params[:, places]).view(np.int64)
        inputs[_INTS, :count] = sampler.int_params[:, places]
        due = np.zeros((3, size, DUE), np.int64)
        due[2] = -1
        for index, (row, tokens, end) in enumerate(starts):
            inputs[_POSITION, index] = inputs[_END, index] = end
            # The last row is the last token; rows before a branch's first token are padding.
            positions = np.arange(end - len(tokens), end)
            due[0, index, DUE - len(tokens) :] = tokens
            due[1, index, DUE - len(tokens) :] = positions
            due[2, index, DUE - len(tokens) :] = self._attention.slots(row, positions)
        self._inputs.copy_(to_device(torch.from_numpy(inputs), self._device))
        rows = to_device(torch.from_numpy(due.reshape(3, -1)), self._device)
        self._due[:, : size * DUE].copy_(rows)
        last = max(end for _, _, end in starts) + depth - 1
        self._attention.fill([row for row, _, _ in starts], last)
