"""A small model's chains of guesses, all levels in one native call.

Of a small model's guess Python and the plan of a step are the larger part. But the levels of a chain are steps of known
shapes, and all that one needs of the one before is its guess. So they are recorded together: the look-up of the guessed
tokens' embeddings, the layers, the read-out and the guess with its noise. When they are repeated only positions, slots
and laws are new. The kernels are those of the levels one by one, and so are the guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from engine.attention.layer import has_compiled_kernel
from engine.cache.paged_kv import KVCache
from engine.models.decoder import Decoder
from engine.models.interface import Model
from engine.sampling.truncation import Floats, Ints
from engine.speculation.drafters.proposal import DraftSampler, write_best
from kernels.cpu.runtime.kernel_graph import KernelGraphCache
from kernels.cpu.runtime.recorder import end_layer, end_part

MOST = 16
"""Branches whose chains are computed together. With more, Python is a small part."""
_SHAPES = 64
"""Most shapes of chains that are kept, at some 100 kB each."""
_SMALL = 1 << 24
"""Most weights of a model whose chains are computed here. A pass of a larger one takes milliseconds, and branches had
better read a long prefix together, which they do level by level."""
DUE = 2
"""Most tokens of a branch that the first level computes: its last one, and the last guess if that was right."""


class ChainStart(NamedTuple):
    """Where a branch's chain begins."""

    row: int
    """Of the cache's page table. There are pages for the guesses too."""
    due: Sequence[int]
    """The branch's last tokens, up to ``DUE``: all that are not computed."""
    end: int
    """How many tokens it has."""


class FusedChains:
    """FusedChains of one model over one cache."""

    def __init__(self, model: Decoder, cache: KVCache, limit: int) -> None:
        """``limit``: most tokens of a branch, guesses included. For a model that ``supports_fused_chains``."""
        self._model, self._cache, self._limit = model, cache, limit
        self._known: dict[tuple[int, ...], _Chain] = {}
        self._tapes: KernelGraphCache[Tensor] = KernelGraphCache()

    def __call__(
        self, starts: Sequence[ChainStart], guesses: DraftSampler, depth: int, width: int
    ) -> tuple[Ints, Floats]:
        """Tokens and chances ``[depth, branches, width]``: at each level the best guess after the best one of the level
        before it, and runners-up (``DraftSampler.best``). Up to ``MOST`` branches. Valid until the next call."""
        shape = sum(len(start.due) for start in starts), len(starts), width, torch.get_num_threads()
        chain = self._known.get(shape)
        if chain is None or depth > chain.depth or shape not in self._tapes:
            if len(self._known) == _SHAPES:
                self._known, self._tapes = {}, KernelGraphCache()
            self._tapes.discard(shape)
            chain = self._known[shape] = _Chain(self._model, self._cache, self._limit, *shape[:3], depth)
        chain.fill(starts, guesses, depth)
        # Of one that was recorded for deeper chains, only so many levels.
        self._tapes(shape, chain.compute, depth)
        tokens, chances = chain.found
        return tokens[:depth], chances[:depth]


def supports_fused_chains(model: Model, cache: KVCache) -> TypeGuard[Decoder]:
    """Whether all that a chain of a small model does is to launch kernels that a ``KernelGraph`` records, and each
    token sees all before it."""
    return (
        isinstance(model, Decoder)
        and has_compiled_kernel(model.config.attention[0], cache.data)
        and all(layer.window is None for layer in model.config.attention)
        and (cache.page_size == 16 or cache.page_size % 16 > 0)  # what the kernel takes for a page
        and model.parameters <= _SMALL
        and model.is_recordable
        and model.is_head_recordable
    )


class _Chain:
    """FusedChains of one shape, and the memory that its tape reads and writes."""

    def __init__(
        self, model: Decoder, cache: KVCache, limit: int, due: int, branches: int, width: int, depth: int
    ) -> None:
        """``due``: tokens of the first level. ``depth``: most levels."""
        from engine.attention.cpu_numba import RecordableAttention

        self._model, self._cache, self.depth = model, cache, depth
        total = due + (depth - 1) * branches
        self._laws = torch.empty(3, branches, dtype=torch.float64)
        inputs = torch.empty(7 * branches + due + 1, dtype=torch.int64)
        places, starts, self._due, self._asked = inputs.tensor_split((4 * branches, 7 * branches, len(inputs) - 1))
        self._places, self._starts = places.view(4, branches), starts.view(branches, 3)
        self._noise, self._changing = self._places[:3].numpy(), inputs[3 * branches :].numpy()
        """What is new for other branches, as the laws are, and what is new in each step."""
        self._guesses: DraftSampler | None = None
        """What the laws and the noise were filled with."""
        self._plan = torch.zeros(4, total, dtype=torch.int64)
        self._last = torch.empty(branches, dtype=torch.int64)
        self._angles = [torch.empty(total, table.shape[1]) for table in model.rope_tables]
        self._tokens = torch.empty(depth, branches, width, dtype=torch.int64)
        self._chances = torch.empty(depth, branches, width, dtype=torch.float64)
        self.found = self._tokens.numpy(), self._chances.numpy()
        """The guesses, after ``compute``."""
        ends = [due + level * branches for level in range(depth)]
        self._levels = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        layers, kv, pages = model.config.attention, cache.data, cache.page_table
        self._attention = [
            RecordableAttention(layers, kv, cache.scales, pages, self._plan[:3, level], max_keys=limit)
            for level in self._levels
        ]

    def fill(self, starts: Sequence[ChainStart], guesses: DraftSampler, depth: int) -> None:
        """Writes what the next ``compute`` reads, of which so many levels are wanted."""
        if guesses is not self._guesses:
            self._guesses = guesses
            self._laws.numpy()[:], self._noise[:] = guesses.laws, guesses.places[:3]
        words = [end for _, _, end in starts]
        for row, due, end in starts:
            words += row, end, len(due)
        for _, due, _ in starts:
            words += due
        words.append(depth)
        self._changing[:] = words

    def compute(self) -> Tensor:
        """Launches the kernels of all levels."""
        from kernels.cpu.sampling.draft_chain import gather_rows, plan_chains

        model, pages = self._model, self._cache.page_table
        address, columns = pages.ctypes.data, pages.shape[1]
        plan_chains(self._starts, address, columns, self._cache.page_size, self._plan, self._last, self._asked)
        for angles, table in zip(self._angles, model.rope_tables, strict=True):
            gather_rows(table, self._plan[3], out=angles)
        tokens = self._due
        for level, (part, attend) in enumerate(zip(self._levels, self._attention, strict=True)):
            hidden = gather_rows(model.embedding, tokens, scale=model.config.embedding_scale)
            hidden = model.forward_layers(hidden, [angles[part] for angles in self._angles], attend)
            if level == 0:
                hidden = gather_rows(hidden, self._last)
            found = self._tokens[level], self._chances[level]
            write_best(model.compute_logits(hidden), self._laws, self._places, level, *found)
            tokens = self._tokens[level, :, 0]
            end_layer()
            end_part()
        return self._tokens
