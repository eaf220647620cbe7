"""One step's way through a model's layers, and that on a GPU with CUDA graphs.

The way of a GPU was never run on one: it is computed by the kernels' references and by Triton's interpreter in tests,
and its kernels are compiled for Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention.cuda_triton import TritonAttention
from engine.attention.plan import AttentionMetadata
from engine.attention.select import create_cpu_attention
from engine.cache.paged_kv import KVCache
from engine.device import to_device
from engine.models.families import DecoderConfig
from engine.models.interface import Batch, Model
from engine.runner.forward_cpu import CpuForward
from engine.sampling.sampler import Floats, Ints
from engine.scheduler.sequence import GenerateSequence
from kernels.common import warmup
from kernels.common.attention_schedule import Buffers

_KEPT = 64
"""Graphs, at most; the one that was not used for longest goes first."""


class Forward(Protocol):
    """A step's way through a model."""

    def __call__(self, batch: Batch, rows: AttentionMetadata, read: Sequence[int] | None = None) -> Tensor:
        """Final hidden states ``[tokens or more, hidden]`` of a step's ``batch``, which is on the host; of those of its
        tokens alone that are to be ``read`` if that says which, ascending. The others leave keys and values."""
        ...

    def draw(
        self, hidden: Tensor, branches: Sequence[GenerateSequence], counts: Sequence[int]
    ) -> tuple[Tensor, Ints, Floats] | None:
        """Logits, tokens and their log-probabilities, drawn after all ``hidden`` states that the last call returned:
        ``counts`` of each of the branches, whose requests change no logits. ``None`` where there is no short way to
        them. They are valid until the next call."""
        ...


def create_forward(model: Model, cache: KVCache, *, deterministic: bool = False) -> Forward:
    """The way through a model's layers where the model lies, over a cache's first layers there.

    ``deterministic``: on the CPU, what a token gets is, bit for bit, a function of its sequence alone.
    """
    about, own = model.config.attention, slice(model.config.num_layers)
    kv, scales = cache.data[own], cache.scales_of(own)
    if model.device_config.uses_gpu_kernels:
        return GpuForward(model, TritonAttention(about, kv, scales), model.device_config.device)
    return CpuForward(
        model, create_cpu_attention(about, kv, scales, deterministic=deterministic), kv, len(cache.page_table)
    )


class Graph(Protocol):
    """A captured computation."""

    output: Tensor
    """What every replay writes."""

    def replay(self) -> None:
        """Computes it again, of what its inputs hold now."""
        ...


class CudaGraph:
    """Kernels that a GPU launches without the host. What they allocate stays theirs, in memory that all graphs share:
    the output of one is valid until another is replayed."""

    _pool: Any = None

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        """``compute`` must have run before, so that its kernels are compiled. It is captured, not run."""
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: it is this one's calls that are captured.
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool, capture_error_mode="thread_local"):
            self.output = compute()

    def replay(self) -> None:
        """See ``Graph``."""
        self._graph.replay()


class GpuForward:
    """On a GPU, which nothing here waits for.

    Steps in which every sequence has few new tokens, one and its guesses, are padded to a multiple of eight (below that
    to a power of two) and captured when their shape is met for the second time; every later one is a replay. All other
    steps are launched kernel by kernel, and so are those of mixtures of experts, whose sizes the host must know.
    """

    def __init__(
        self,
        model: Model,
        attend: TritonAttention,
        device: torch.device,
        capture: Callable[[Callable[[], Tensor]], Graph] = CudaGraph,
    ) -> None:
        self._model = model
        self._attend = attend
        self._device = device
        self._capture = capture
        self._captures = isinstance(model.config, DecoderConfig) and model.config.experts is None
        self._inputs: dict[int, Tensor] = {}
        """Tokens and positions of the steps of one size, where its graphs read them: ``[2, size]``."""
        self._graphs: dict[tuple[int, tuple[Buffers, ...]], Graph | None] = {}
        """By size and by the attention's buffers; ``None``: met once."""

    def __call__(self, batch: Batch, rows: AttentionMetadata, read: Sequence[int] | None = None) -> Tensor:
        """See ``Forward``. On return the device may not even have begun."""
        hidden = self._all(batch, rows)
        return hidden if read is None else hidden[to_device(torch.tensor(read, dtype=torch.int64), self._device)]

    def _all(self, batch: Batch, rows: AttentionMetadata) -> Tensor:
        self._attend.prepare(rows)
        if not self._captures or not self._attend.is_repeatable:
            tokens, positions = to_device(torch.stack((batch.tokens, batch.positions)), self._device)
            return self._model.forward(Batch(tokens, positions), self._attend)
        size = padded(len(batch.tokens))
        inputs = self._fill(batch, size)
        key = size, self._attend.buffers
        met = key in self._graphs
        graph = self._graphs.pop(key, None)
        if graph is None:
            warmup.count_first_run()
        if met and graph is None:
            graph = self._capture(lambda: self._model.forward(Batch(*inputs), self._attend))
        self._graphs[key] = graph
        if len(self._graphs) > _KEPT:
            del self._graphs[next(iter(self._graphs))]
        if graph is None:
            return self._model.forward(Batch(*inputs), self._attend)
        graph.replay()
        return graph.output

    def draw(self, *_: object) -> None:
        """See ``Forward``."""

    def _fill(self, batch: Batch, size: int) -> Tensor:
        """Sends a step's tokens and positions to where the graphs of this size read them."""
        host = np.zeros((2, size), np.int64)
        host[0, : len(batch.tokens)], host[1, : len(batch.tokens)] = batch.tokens.numpy(), batch.positions.numpy()
        inputs = self._inputs.get(size)
        if inputs is None:
            inputs = self._inputs[size] = torch.empty(2, size, dtype=torch.int64, device=self._device)
        return inputs.copy_(to_device(torch.from_numpy(host), self._device))


def padded(tokens: int) -> int:
    """The size that a decoding step of so many tokens is computed in."""
    return 1 << (tokens - 1).bit_length() if tokens < 8 else -(-tokens // 8) * 8
