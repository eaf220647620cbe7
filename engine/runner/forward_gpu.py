"""The forward pass on a GPU, from CUDA graphs for small steps.

Without a GPU its tests run it on the kernels' references and in Triton's interpreter, and compile its kernels for
Hopper; ``python -m benchmarks.gpu correctness`` runs them on one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.cuda_triton import TritonAttention
from engine.attention.plan import AttentionMetadata
from engine.device import to_device
from engine.models.decoder import Decoder
from engine.models.interface import Batch, KeepState, Model
from engine.runner.fused_sampler_cpu import FusedCpuSampler
from kernels.common import warmup
from kernels.common.attention_schedule import TileBuffers

_MAX_GRAPHS = 64
"""Maximum number of graphs; the least recently used one is dropped."""


Replay = Callable[[], Tensor]
"""Function that computes a captured result from the current contents of its inputs, always in the same tensor."""


class GraphPool:
    """CUDA graphs that share one memory: the result of one is valid until another is replayed."""

    def __init__(self) -> None:
        self._newest: torch.cuda.CUDAGraph | None = None
        """Keeps the memory: torch can capture nothing more into that of graphs which all have died."""

    def capture(self, compute: Callable[[], Tensor]) -> Replay:
        """Capture ``compute`` without running it. It must have run before, so that its kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._newest is None else self._newest.pool()
        # Only this thread's calls are captured; other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = compute()
        self._newest = graph

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def pad_num_tokens(num_tokens: int) -> int:
    """Return the padded size of a step: a power of two below 8, else a multiple of 8."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens < 8 else -(-num_tokens // 8) * 8


class GpuForward:
    """A ``Forward`` on a GPU that never waits for the device.

    Steps in which every sequence has few new tokens (one and its draft) are padded (``pad_num_tokens``) and captured
    the second time their shape occurs; later ones are replays. All other steps launch kernel by kernel, and so do
    mixtures of experts whose sizes the host must know.
    """

    fused_sampler: FusedCpuSampler | None = None

    def __init__(
        self,
        model: Model,
        attend: TritonAttention,
        device: torch.device,
        capture: Callable[[Callable[[], Tensor]], Replay] | None = None,
    ) -> None:
        self._model = model
        self._attend = attend
        self._device = device
        self._capture = capture or GraphPool().capture
        self._can_capture = isinstance(model, Decoder) and model.is_capturable
        self._inputs_gpu: dict[int, Tensor] = {}
        """Tokens and positions ``[2, size]`` that the graphs of each padded size read."""
        self._graphs: dict[tuple[int, tuple[TileBuffers, ...], frozenset[int]], Replay | None] = {}
        """Graphs by padded size, attention buffers and kept layers, least recently used first; ``None``: the shape
        occurred once."""
        self.kept: Mapping[int, Tensor] = {}
        self._kept_buffers: dict[int, dict[int, Tensor]] = {}
        """Hidden states that graphs keep, by padded size and layer."""

    def __call__(
        self,
        batch: Batch,
        rows: AttentionMetadata,
        read: Sequence[int] | None = None,
        layers: frozenset[int] = frozenset(),
    ) -> Tensor:
        hidden = self._forward(batch, rows, layers)
        return hidden if read is None else hidden[to_device(torch.tensor(read, dtype=torch.int64), self._device)]

    def _forward(self, batch: Batch, rows: AttentionMetadata, layers: frozenset[int]) -> Tensor:
        self._attend.prepare(rows)
        if not self._can_capture or not self._attend.is_repeatable:
            tokens, positions = to_device(torch.stack((batch.tokens, batch.positions)), self._device)
            if batch.unread is not None:
                batch.unread.fill(tokens)
            return self._model.forward(Batch(tokens, positions), self._attend, self._keep(layers))
        size = pad_num_tokens(len(batch.tokens))
        inputs = self._copy_inputs(batch, size)
        keep = self._keep(layers, size)
        key = size, self._attend.buffers, layers
        has_occurred = key in self._graphs
        graph = self._graphs.pop(key, None)
        if graph is None:
            warmup.count_first_run()
        model, attend = self._model, self._attend
        if has_occurred and graph is None:
            graph = self._capture(lambda: model.forward(Batch(*inputs), attend, keep))
        self._graphs[key] = graph
        if len(self._graphs) > _MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        if graph is None:
            return model.forward(Batch(*inputs), attend, keep)
        return graph()

    def _keep(self, layers: frozenset[int], size: int | None = None) -> KeepState | None:
        """Return a function that keeps hidden states; of a step that may be captured, of this padded size, as copies.

        The first run of a shape launches kernel by kernel, and so the copies have their places before a capture.
        """
        if not layers:
            return None
        kept = {} if size is None else self._kept_buffers.setdefault(size, {})
        self.kept = kept

        def keep(layer: int, hidden: Tensor) -> None:
            if layer not in layers:
                return
            if size is None or layer not in kept:
                kept[layer] = hidden.clone()
            else:
                kept[layer].copy_(hidden)

        return keep

    def _copy_inputs(self, batch: Batch, size: int) -> Tensor:
        """Copy a step's tokens and positions to where the graphs of this padded size read them."""
        host = np.zeros((2, size), np.int64)
        host[0, : len(batch.tokens)], host[1, : len(batch.tokens)] = batch.tokens.numpy(), batch.positions.numpy()
        inputs = self._inputs_gpu.get(size)
        if inputs is None:
            inputs = self._inputs_gpu[size] = torch.empty(2, size, dtype=torch.int64, device=self._device)
        inputs.copy_(to_device(torch.from_numpy(host), self._device))
        if batch.unread is not None:
            batch.unread.fill(inputs[0])
        return inputs
