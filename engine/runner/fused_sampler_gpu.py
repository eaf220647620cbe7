"""Sampling on a GPU from one CUDA graph: final norm, output projection and sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.device import copy_to_place
from engine.models.interface import Model
from engine.runner.graph_pool import Capture, Replay, pad_num_tokens
from engine.sampling.gpu import launch_sampling, num_columns, pack_columns
from engine.sampling.sampler import Array
from kernels.common import warmup
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors

_MAX_LOGITS = 1 << 25
"""Maximum number of logits of a captured step, 128 MiB, which the graphs share. With more rows nothing waits for the
host."""


@dataclass(slots=True)
class _Step:
    """Places of the inputs and the result of steps of one padded size."""

    hidden: Tensor
    columns: Tensor
    """Sampling parameters and noise keys, see ``pack_columns``."""
    graph: tuple[Replay, Tensor] | None = field(default=None)
    """Replay and result; ``None``: the size occurred once."""


class FusedGpuSampler:
    """Samples one token after each of some hidden states, in a graph that is captured when a size occurs again.

    The graph is apart from that of the layers, which there is for each shape of the attention. The host launches one
    after the other, so the GPU does not wait between them.
    """

    def __init__(self, model: Model, device: torch.device, capture: Capture) -> None:
        self._model, self._device, self._capture = model, device, capture
        self._max_rows = _MAX_LOGITS // model.config.vocab_size
        self._steps: dict[int, _Step] = {}

    def launch(self, hidden: Tensor, params: SamplingTensors[Array], noise_keys: NoiseKeys[Array]) -> Tensor | None:
        """Launch the sampling after hidden states ``[rows, hidden]``, whose logits nothing else changes or reads.

        Returns int64 ``[2, rows]`` on the device, as ``launch_sampling`` does, without waiting; valid until the next
        call. ``None`` if there are too many rows.
        """
        rows = len(hidden)
        size = pad_num_tokens(rows)
        if size > self._max_rows:
            return None
        step = self._steps.get(size)
        is_new = step is None
        if step is None:
            columns = torch.empty(7, num_columns(size), dtype=torch.int64, device=self._device)
            step = self._steps[size] = _Step(hidden.new_zeros(size, hidden.shape[1]), columns)
        copy_to_place(pack_columns(params, noise_keys, size), step.columns)
        step.hidden[:rows].copy_(hidden)
        if step.graph is None:
            warmup.count_first_run()
        if step.graph is None and not is_new:
            step.graph = self._capture(lambda: self._sample(step))
        if step.graph is None:
            return self._sample(step)[:, :rows]
        replay, samples = step.graph
        replay()
        return samples[:, :rows]

    def _sample(self, step: _Step) -> Tensor:
        return launch_sampling(self._model.compute_logits(step.hidden), step.columns[:, : len(step.hidden)])
