"""Chains of a small model, all levels in one native call.

A large part of a small model's time per token is Python and the plan of the step. The levels of a chain are steps of
known shapes that need nothing of the one before but its draft token, so they are recorded together: the lookup of the
draft tokens' embeddings, the layers, the logits and the sampling with the branch's noise. On replay only positions,
slots and sampling parameters are new. The kernels are those of single levels, and so are the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from engine.attention.layer import has_compiled_kernel
from engine.cache.paged_kv import KVCache
from engine.models.decoder import Decoder, StepInputs
from engine.models.interface import Model
from engine.sampling.sampler import Floats, Ints
from engine.speculation.drafters.proposal import DraftSampler, write_best
from kernels.cpu.runtime.kernel_graph import KernelGraphCache
from kernels.cpu.runtime.recorder import end_layer, end_part

MOST = 16
"""Maximum number of branches of a fused call. With more, Python is a small part of the time."""
_SHAPES = 64
"""Maximum number of recorded shapes, of about 100 kB each."""
_SMALL = 1 << 24
"""Maximum number of parameters of a model with fused chains. A pass of a larger one takes milliseconds, and branches
read a long shared prefix faster level by level."""
DUE = 2
"""Maximum number of a branch's tokens in the first level: its last one, and the last draft token if it was accepted."""


class ChainStart(NamedTuple):
    """Start of a branch's chain."""

    row: int
    """Row of the page table, with pages for the draft tokens too."""
    due: Sequence[int]
    """Last tokens of the branch, up to ``DUE``: all that are not computed."""
    end: int
    """Number of tokens of the branch."""


class FusedChains:
    """FusedChains of one model over one cache."""

    def __init__(self, model: Decoder, cache: KVCache, limit: int) -> None:
        """``limit``: maximum number of tokens of a branch, draft included. For models with
        ``supports_fused_chains``."""
        self._model, self._cache, self._limit = model, cache, limit
        self._known: dict[tuple[int, ...], _Chain] = {}
        self._graphs: KernelGraphCache[Tensor] = KernelGraphCache()

    def __call__(
        self, starts: Sequence[ChainStart], sampler: DraftSampler, depth: int, width: int
    ) -> tuple[Ints, Floats]:
        """Return tokens and probabilities ``[depth, branches, width]``, valid until the next call.

        Each level has the best draft token after the best one of the level before, and runners-up
        (``DraftSampler.best``). For at most ``MOST`` branches."""
        num_tokens, num_branches = sum(len(start.due) for start in starts), len(starts)
        shape = num_tokens, num_branches, width, torch.get_num_threads()
        chain = self._known.get(shape)
        if chain is None or depth > chain.depth or shape not in self._graphs:
            if len(self._known) == _SHAPES:
                self._known, self._graphs = {}, KernelGraphCache()
            self._graphs.discard(shape)
            chain = self._known[shape] = _Chain(
                self._model,
                self._cache,
                limit=self._limit,
                due=num_tokens,
                branches=num_branches,
                width=width,
                depth=depth,
            )
        chain.fill(starts, sampler, depth)
        # A chain recorded for more levels is replayed up to ``depth``.
        self._graphs(shape, chain.compute, depth)
        tokens, probs = chain.found
        return tokens[:depth], probs[:depth]


def supports_fused_chains(model: Model, cache: KVCache) -> TypeGuard[Decoder]:
    """Return True if a chain of the model launches recordable kernels only, and each token attends to all before it."""
    return (
        isinstance(model, Decoder)
        and has_compiled_kernel(model.config.attention[0], cache.data)
        and not model.config.states
        and all(layer.window is None for layer in model.config.attention)
        and (cache.page_size == 16 or cache.page_size % 16 > 0)  # what the kernel takes for a page
        and model.parameters <= _SMALL
        and model.is_recordable
        and model.is_head_recordable
    )


class _Chain:
    """Chains of one shape, and the buffers that their kernel graph reads and writes."""

    def __init__(
        self, model: Decoder, cache: KVCache, limit: int, due: int, branches: int, width: int, depth: int
    ) -> None:
        """``due``: tokens of the first level; ``depth``: maximum number of levels."""
        from engine.attention.cpu_numba import RecordableAttention

        self._model, self._cache, self.depth = model, cache, depth
        total = due + (depth - 1) * branches
        self._float_params = torch.empty(3, branches, dtype=torch.float64)
        inputs = torch.empty(7 * branches + due + 1, dtype=torch.int64)
        places, starts, self._due, self._asked = inputs.tensor_split((4 * branches, 7 * branches, len(inputs) - 1))
        self._places, self._starts = places.view(4, branches), starts.view(branches, 3)
        self._noise, self._changing = self._places[:3].numpy(), inputs[3 * branches :].numpy()
        """Inputs that change with the branches, like the parameters, and inputs that change in each step."""
        self._sampler: DraftSampler | None = None
        """Sampler whose parameters the buffers hold."""
        self._plan = torch.zeros(4, total, dtype=torch.int64)
        self._last = torch.empty(branches, dtype=torch.int64)
        self._angles = [torch.empty(total, table.shape[1]) for table in model.rope_tables]
        self._tokens = torch.empty(depth, branches, width, dtype=torch.int64)
        self._probs = torch.empty(depth, branches, width, dtype=torch.float64)
        self.found = self._tokens.numpy(), self._probs.numpy()
        """Draft tokens and probabilities, after ``compute``."""
        ends = [due + level * branches for level in range(depth)]
        self._levels = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        layers, kv, pages = model.config.attention, cache.data, cache.page_table
        self._attention = [
            RecordableAttention(
                layers, kv, scales=cache.scales, page_table=pages, plan=self._plan[:3, level], max_keys=limit
            )
            for level in self._levels
        ]

    def fill(self, starts: Sequence[ChainStart], sampler: DraftSampler, depth: int) -> None:
        """Write the inputs of the next ``compute``, of ``depth`` levels."""
        if sampler is not self._sampler:
            self._sampler = sampler
            self._float_params.numpy()[:], self._noise[:] = sampler.float_params, sampler.int_params[:3]
        words = [end for _, _, end in starts]
        for row, due, end in starts:
            words += row, end, len(due)
        for _, due, _ in starts:
            words += due
        words.append(depth)
        self._changing[:] = words

    def compute(self) -> Tensor:
        """Launch the kernels of all levels."""
        from kernels.cpu.sampling.draft_chain import gather_rows, plan_chains

        model, pages = self._model, self._cache.page_table
        address, columns = pages.ctypes.data, pages.shape[1]
        plan_chains(self._starts, address, columns, self._cache.page_size, self._plan, self._last, self._asked)
        for angles, table in zip(self._angles, model.rope_tables, strict=True):
            gather_rows(table, self._plan[3], out=angles)
        tokens = self._due
        for level, (part, attend) in enumerate(zip(self._levels, self._attention, strict=True)):
            hidden = model.embedding(tokens, model.config.embedding_scale)
            inputs = StepInputs(hidden, [angles[part] for angles in self._angles])
            hidden = model.forward_layers(inputs, attend)
            if level == 0:
                hidden = gather_rows(hidden, self._last)
            write_best(
                model.compute_logits(hidden),
                self._float_params,
                int_params=self._places,
                ahead=level,
                tokens=self._tokens[level],
                probs=self._probs[level],
            )
            tokens = self._tokens[level, :, 0]
            end_layer()
            end_part()
        return self._tokens
