"""Sampling of a decoding step on the CPU, fused with the output projection in recorded kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cache.page_table import PageTable
from engine.models.decoder import Decoder
from engine.sampling.sampler import Floats, Ints
from engine.scheduler.sequence import GenerateSequence
from kernels.cpu.runtime.kernel_graph import KernelGraphCache

_MAX_LOGITS = 1 << 20
"""Maximum number of logits of a recorded step, which keeps the memory for them."""


class FusedCpuSampler:
    """Computes logits and samples one token after each of some hidden states, replayed from recorded kernels.

    Only the position of a branch's noise changes from step to step. Its other parameters are written once, to a table
    with a row for each row of the cache's page table, and a kernel gathers what each token needs.
    """

    def __init__(self, model: Decoder, positions: Tensor, num_rows: int) -> None:
        """``model`` must be ``is_head_recordable``. ``positions`` ``[max tokens]``: the positions of the hidden states.

        ``num_rows``: rows of the cache's page table.
        """
        self._model, self._positions = model, positions
        max_tokens = positions.shape[0]
        self._max_tokens = min(max_tokens, _MAX_LOGITS // model.config.vocab_size)
        self.hidden: Tensor | None = None
        """Hidden states that stay in place from step to step, written last by recorded kernels."""
        self._written_tables: list[PageTable | None] = [None] * num_rows
        """Page table of the branch whose parameters each row holds."""
        self._branch_floats = torch.zeros(num_rows, 3, dtype=torch.float64)
        """Temperature, top-p and min-p threshold of each branch."""
        self._branch_ints = torch.zeros(num_rows, 3, dtype=torch.int64)
        """Top-k, seed and key of each branch."""
        self._branch_numpy = self._branch_floats.numpy(), self._branch_ints.numpy()
        self._rows = torch.zeros(max_tokens, dtype=torch.int64)
        """Row of each token's branch."""
        self._rows_numpy = self._rows.numpy()
        self._float_params = torch.empty(3 * max_tokens, dtype=torch.float64)
        self._int_params = torch.empty(4 * max_tokens, dtype=torch.int64)
        self._tokens = torch.empty(max_tokens, dtype=torch.int64)
        self._results = torch.empty(3 * max_tokens, dtype=torch.float64)
        """Log-probabilities first; see ``launch_sampling``, as for the three buffers above."""
        buffers = self._float_params, self._int_params, self._tokens, self._results
        self._buffers_numpy = tuple(buffer.numpy() for buffer in buffers)
        self._graphs: KernelGraphCache[Tensor] = KernelGraphCache()

    def sample(
        self, hidden: Tensor, sequences: Sequence[GenerateSequence], counts: Sequence[int]
    ) -> tuple[Tensor, Ints, Floats] | None:
        """Sample after all ``hidden`` states, ``counts`` of each sequence; no request may have logits processors.

        Returns logits ``[tokens, vocab]``, tokens and their log-probabilities ``[tokens]``, valid until the next call;
        ``None`` if ``hidden`` was not written by recorded kernels or is too large. Tokens are -1 where logits are not
        finite.
        """
        if hidden is not self.hidden or hidden.shape[0] > self._max_tokens:
            return None
        from kernels.cpu.sampling.sampler import resolve_near_ties

        rows: list[int] = []
        for sequence, count in zip(sequences, counts, strict=True):
            table = sequence.pages
            if self._written_tables[table.row] is not table:
                self._write_params(table, sequence)
            rows += [table.row] * count
        num_tokens = len(rows)
        self._rows_numpy[:num_tokens] = rows
        # Recorded kernels read the hidden states at the address that they had.
        key = hidden.data_ptr(), num_tokens, torch.get_num_threads()
        logits = self._graphs(key, lambda: self._launch(hidden))
        float_params, int_params, token_buffer, results = self._buffers_numpy
        tokens, logprobs = token_buffer[:num_tokens], results[:num_tokens]
        if tokens.min() < 0:  # rare
            tokens, logprobs = resolve_near_ties(
                logits,
                float_params[: 3 * num_tokens].reshape(3, num_tokens),
                int_params[: 4 * num_tokens].reshape(4, num_tokens),
                tokens,
                results[: 3 * num_tokens].reshape(3, num_tokens),
            )
        return logits, tokens, logprobs

    def _write_params(self, table: PageTable, sequence: GenerateSequence) -> None:
        from kernels.cpu.sampling.sampler import min_p_threshold

        sampling, row, (floats, ints) = sequence.sampling, table.row, self._branch_numpy
        threshold = -math.inf
        if sampling.min_p:
            [threshold] = min_p_threshold(np.array([sampling.temperature]), np.array([sampling.min_p]))
        floats[row] = sampling.temperature, sampling.top_p, threshold
        ints[row] = sampling.top_k, sequence.seed, sequence.key
        self._written_tables[row] = table

    def _launch(self, hidden: Tensor) -> Tensor:
        from kernels.cpu.sampling.params import gather_params
        from kernels.cpu.sampling.sampler import launch_sampling

        num_tokens = hidden.shape[0]
        rows, positions = self._rows[:num_tokens], self._positions[:num_tokens]
        floats, ints = self._float_params[: 3 * num_tokens], self._int_params[: 4 * num_tokens]
        gather_params(self._branch_floats, self._branch_ints, rows, positions, floats, ints)
        logits = self._model.compute_logits(hidden)
        launch_sampling(logits, floats, ints, self._tokens[:num_tokens], self._results[: 3 * num_tokens])
        return logits
