"""The draws of a decoding step on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cache.paged_kv import PageTable
from engine.models.decoder import Decoder
from engine.sampling.sampler import Floats, Ints, checked
from engine.scheduler.sequence import GenerateSequence
from kernels.cpu.runtime.kernel_graph import KernelGraphCache

_Drawn = tuple[Tensor, Ints, Floats]
"""Logits ``[rows, vocab]``; tokens and their log-probabilities, ``[rows]`` each
(``engine.sampling.sampler.sample``)."""


class FusedCpuSampler:
    """Reads hidden states and draws after each of them, all repeated from a tape.

    Of a branch only the position of its noise changes from step to step. So its law is written down when it is met for
    the first time, in a table that has a row for each of the cache's, and a kernel gathers what the tokens need.
    """

    def __init__(self, model: Decoder, positions: Tensor, rows: int) -> None:
        """``model``: one that is ``read_repeatable``. ``positions``: where those of a step's tokens are written to,
        ``[most]``. ``rows``: of the cache's page table."""
        self._model, self._positions = model, positions
        most = positions.shape[0]
        self._tables: list[PageTable | None] = [None] * rows
        """Whose laws are known."""
        self._laws = torch.zeros(rows, 3, dtype=torch.float64)
        self._noise = torch.zeros(rows, 3, dtype=torch.int64)
        self._written = self._laws.numpy(), self._noise.numpy()
        self._rows = torch.zeros(most, dtype=torch.int64)
        self._held = (
            torch.empty(3 * most, dtype=torch.float64),
            torch.empty(4 * most, dtype=torch.int64),
            torch.empty(most, dtype=torch.int64),
            torch.empty(3 * most, dtype=torch.float64),
        )
        """Settings, places, tokens and what is found: see ``launch_sampling``."""
        self._seen = tuple(part.numpy() for part in self._held)
        self._filled = self._rows.numpy()
        self._tapes: KernelGraphCache[Tensor] = KernelGraphCache()

    def __call__(self, hidden: Tensor, branches: Sequence[GenerateSequence], counts: Sequence[int]) -> _Drawn:
        """What ``counts`` of the ``hidden`` states of each branch give. Raises ``EngineError`` when logits are not
        finite. What it returns is valid until the next call."""
        from kernels.cpu.sampling.sampler import resolve_near_ties

        owners: list[int] = []
        for sequence, count in zip(branches, counts, strict=True):
            table = sequence.pages
            if self._tables[table.row] is not table:
                self._write(table, sequence)
            owners += [table.row] * count
        rows = len(owners)
        self._filled[:rows] = owners
        # The tape reads hidden states where they were.
        key = hidden.data_ptr(), rows, torch.get_num_threads()
        logits = self._tapes(key, lambda: self._compute(hidden))
        settings, places, tokens, found = self._seen
        drawn, logprobs = tokens[:rows], found[:rows]
        if drawn.min() < 0:  # hardly ever
            parts = settings[: 3 * rows].reshape(3, rows), places[: 4 * rows].reshape(4, rows)
            drawn, logprobs = checked(*resolve_near_ties(logits, *parts, drawn, found[: 3 * rows].reshape(3, rows)))
        return logits, drawn, logprobs

    def _write(self, table: PageTable, sequence: GenerateSequence) -> None:
        from kernels.cpu.sampling.sampler import min_p_threshold

        law, row, (laws, noise) = sequence.sampling, table.row, self._written
        reach = -math.inf
        if law.min_p:
            [reach] = min_p_threshold(np.array([law.temperature]), np.array([law.min_p]))
        laws[row] = law.temperature, law.top_p, reach
        noise[row] = law.top_k, sequence.seed, sequence.key
        self._tables[row] = table

    def _compute(self, hidden: Tensor) -> Tensor:
        from kernels.cpu.sampling.params import gather_params
        from kernels.cpu.sampling.sampler import launch_sampling

        rows = hidden.shape[0]
        settings, places, tokens, found = self._held
        parts = settings[: 3 * rows], places[: 4 * rows]
        gather_params(self._laws, self._noise, self._rows[:rows], self._positions[:rows], *parts)
        logits = self._model.compute_logits(hidden)
        launch_sampling(logits, *parts, tokens[:rows], found[: 3 * rows])
        return logits
