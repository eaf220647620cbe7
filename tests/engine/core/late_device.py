"""A device that computes launched work late: only when the host waits for it, and in the order of the launches.

Its model is a closed form. Each slot of the cache holds a mark that depends on all tokens up to its own, and logits are
a hash of the marks in a row's pages: a wrong token, page or position changes what is sampled. Before work is computed
its results hold values that no test accepts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.plan import AttentionMetadata
from engine.cache.paged_kv import KVCache
from engine.device import DeviceConfig
from engine.models.interface import Batch
from engine.runner.logprobs import read_prompt
from engine.sampling.logits_processors import LogitsRow, apply_logits_processors
from engine.sampling.sampler import Floats, Ints
from kernels.cpu.sampling import sampler
from tests.engine.gpu import emulate_gpu

_MODULUS = 1_000_003
"""Modulus of the marks, below which float32 is exact."""
_NOT_COMPUTED = -7


class LateSamples:
    """Samples that exist once the device has computed them."""

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        self.tokens_gpu, self._logprobs = tokens, logprobs

    def read(self) -> tuple[Ints, Floats]:
        tokens = self.tokens_gpu.numpy()
        assert tokens.min() > _NOT_COMPUTED, "the host reads a token before its step is finished"
        return tokens.copy(), self._logprobs.numpy().copy()


class LateEvent:
    def __init__(self, device: LateDevice, end: int) -> None:
        self._device, self._end = device, end

    def query(self) -> bool:
        return self._device.num_done >= self._end

    def synchronize(self) -> None:
        self._device.compute(self._end)


class _LateSlots:
    """Slots of the cache, which are copied in the order of the launches."""

    def __init__(self, device: LateDevice, data: Tensor) -> None:
        self._device, self._data = device, data

    def __getitem__(self, source: Any) -> Any:
        return source

    def __setitem__(self, target: Any, source: Any) -> None:
        self._device.launch(lambda: self._data[target].copy_(self._data[source]))


class LateDevice:
    """Queue of launched work. Without ``is_late`` all is computed at the launch, as on a CPU."""

    def __init__(self, *, is_late: bool) -> None:
        self.is_late = is_late
        self.num_done = 0
        self.num_launched_ahead = 0
        """Number of steps that were launched while another was in flight."""
        self.num_steps = 0
        self._queue: list[Callable[[], object]] = []
        self._cache: KVCache | None = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Make engines that are created from now on compute on this device."""
        config = DeviceConfig(torch.device("cpu"), torch.float32, uses_gpu_kernels=self.is_late)
        emulate_gpu(patch, config)
        patch.setattr("engine.core.step.create_forward", self._create_forward)
        patch.setattr("engine.core.step.sample_on_gpu", self.sample)
        patch.setattr("engine.core.step.sample_on_cpu", self.sample)
        patch.setattr("engine.runner.sample_step._select_rows", self.select)
        patch.setattr("engine.runner.sample_step.to_host", self.copy)
        patch.setattr("engine.runner.sample_step.read_prompt", self._read_prompt)
        patch.setattr("engine.core.step.record_event", lambda _: LateEvent(self, len(self._queue)))

    def launch(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        if not self.is_late:
            self.compute(len(self._queue))

    def compute(self, end: int) -> None:
        while self.num_done < end:
            work = self._queue[self.num_done]
            self.num_done += 1
            work()

    def _create_forward(self, model: Any, cache: KVCache, **_: object) -> LateDevice:
        model.compute_logits = self.compute_logits
        self._cache = cache
        cache._slot_arrays = [_LateSlots(self, cache.data)]
        return self

    def _read_prompt(self, *arguments: Any) -> None:
        """Compute what was launched and the prompt's logits at once, as a copy that waits does."""
        self.compute(len(self._queue))
        is_late, self.is_late = self.is_late, False
        read_prompt(*arguments)
        self.is_late = is_late

    # The forward pass.

    fused_sampler = None
    kept: dict[int, Tensor] = {}  # noqa: RUF012

    def __call__(
        self, batch: Batch, rows: AttentionMetadata, read: Sequence[int] | None = None, layers: object = None
    ) -> Tensor:
        self.num_steps += 1
        self.num_launched_ahead += self.num_done < len(self._queue)
        assert self._cache is not None
        slots, size = self._cache.data[0, 0, 0, :, :, 0].numpy(), self._cache.page_size
        tokens, unread = batch.tokens.clone(), batch.unread
        tables = rows.page_table.copy()
        queries = list(zip(rows.query_lens.tolist(), rows.seq_lens.tolist(), strict=True))
        trees = dict(rows.tree_masks)
        assert not trees
        hidden = torch.full((len(tokens), 1), torch.nan, dtype=torch.float64)

        def work() -> None:
            if unread is not None:
                unread.fill(tokens)
            assert int(tokens.min()) >= 0, "a placeholder is an input"
            index = 0
            for table, (count, end) in zip(tables, queries, strict=True):
                positions = np.arange(end)
                places = table[positions // size], positions % size
                marks = slots[places].astype(np.int64)
                for position in range(end - count, end):
                    before = marks[position - 1] if position else 0
                    marks[position] = (before * 31 + int(tokens[index]) + 7) % _MODULUS
                    hidden[index] = float(marks[: position + 1].sum() % _MODULUS)
                    index += 1
                slots[places[0][end - count :], places[1][end - count :]] = marks[end - count :]

        self.launch(work)
        return hidden if read is None else self.select(hidden, read)

    def select(self, rows: Tensor, indices: Iterable[int]) -> Tensor:
        indices = list(indices)
        out = torch.full((len(indices), rows.shape[1]), torch.nan, dtype=rows.dtype)
        self.launch(lambda: out.copy_(rows[indices]))
        return out

    def copy(self, values: Tensor) -> Tensor:
        out = torch.full_like(values, torch.nan)
        self.launch(lambda: out.copy_(values))
        return out

    def compute_logits(self, hidden: Tensor, token_ids: Sequence[int] = ()) -> Tensor:
        columns = np.array(token_ids or range(400))
        out = torch.full((len(hidden), len(columns)), torch.nan)

        def work() -> None:
            assert not hidden.isnan().any()
            mixed = (hidden.numpy().astype(np.int64) * 48271 + columns * 16807 + columns**2 * 69621) % 65537
            out.copy_(torch.from_numpy(mixed / 65537 * 8 - 4))

        self.launch(work)
        return out

    def sample(self, logits: Tensor, rows: Sequence[LogitsRow], params: Any, noise_keys: Any) -> LateSamples:
        rows, noise_keys = copy.deepcopy(list(rows)), copy.deepcopy(noise_keys)
        tokens = torch.full((len(logits),), _NOT_COMPUTED)
        logprobs = torch.full((len(logits),), torch.nan, dtype=torch.float64)

        def work() -> None:
            apply_logits_processors(logits, rows)
            for target, values in zip((tokens, logprobs), sampler.sample(logits, params, noise_keys), strict=True):
                target.copy_(torch.from_numpy(np.ascontiguousarray(values)))

        self.launch(work)
        return LateSamples(tokens, logprobs)
