"""The forward pass on a GPU, from CUDA graphs for all but large steps.

Without a GPU its tests run it on the kernels' references and in Triton's interpreter, and compile its kernels for
Hopper; ``python -m benchmarks.gpu correctness`` runs them on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.adapters.products import AdapterRows
from engine.attention.grouped import GpuAttention
from engine.attention.plan import AttentionMetadata
from engine.cache.state_layers import NUM_FIELDS, StateStep
from engine.device import copy_to_place, to_device
from engine.models.decoder import Decoder
from engine.models.interface import Batch, KeepState, Model
from engine.runner.fused_sampler_gpu import FusedGpuSampler
from engine.runner.graph_pool import Capture, GraphPool, Replay, pad_num_tokens
from engine.runner.piecewise_gpu import PiecewiseStep, pad_to_size
from kernels.common import warmup
from kernels.common.attention_schedule import TileBuffers
from kernels.linear.low_rank import NO_ADAPTER

_Graph = tuple[Replay, Tensor]
_MAX_GRAPHS = 64
"""Maximum number of graphs of whole steps; the least recently used one is dropped."""
_MAX_PIECEWISE = 32
"""Maximum number of sizes and kept layers with a graph for each piece; the least recently used one is dropped."""


class GpuForward:
    """A ``Forward`` on a GPU that never waits for the device.

    Steps in which every sequence has few new tokens (one and its draft) are padded (``pad_num_tokens``) and captured
    the second time their shape occurs; later ones are replays. Other steps of up to some hundred tokens are captured in
    pieces (``PiecewiseStep``), with the attention between them. Large steps launch kernel by kernel, and so do mixtures
    of experts whose sizes the host must know.
    """

    def __init__(
        self,
        model: Model,
        attend: GpuAttention,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._attend = attend
        self._device = device
        self._capture = capture or GraphPool().capture
        self._decoder = model if isinstance(model, Decoder) and model.is_capturable else None
        """The model, if it can be captured."""
        # Graphs of its own: a replay that samples must not overwrite the hidden states, which are read later, too.
        self.fused_sampler = FusedGpuSampler(model, device, capture or GraphPool().capture)
        self._inputs_gpu: dict[int, Tensor] = {}
        """Tokens and positions ``[2, size]`` that the graphs of each padded size read."""
        self._segments_gpu: dict[int, Tensor] = {}
        """Segments of states ``[size, 5]`` that they read, of a model with states."""
        self._graphs: dict[tuple[int, tuple[TileBuffers, ...], frozenset[int], bool], _Graph | None] = {}
        """Graphs and their results by padded size, attention buffers, kept layers, and whether rows have adapters,
        least recently used first; ``None``: the shape occurred once."""
        self._piecewise: dict[tuple[int, frozenset[int], bool], PiecewiseStep] = {}
        """Steps with a graph for each piece by padded size, kept layers, and whether rows have adapters, least recently
        used first."""
        self._adapter_rows = AdapterRows()
        """The place from which the model reads the adapters of a step's rows."""
        if isinstance(model, Decoder) and model.adapters is not None:
            self._adapter_rows = model.adapters.rows
        self._adapters_gpu: dict[int, Tensor] = {}
        """Adapters ``[size]`` that the graphs of each padded size read."""
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
        decoder = self._decoder
        if decoder is not None and self._attend.is_repeatable:
            return self._forward_captured(decoder, batch, layers)
        size = pad_to_size(len(batch.tokens))
        if decoder is not None and size is not None:
            return self._forward_piecewise(decoder, batch, size, layers)
        self._adapter_rows.indices = None if batch.adapters is None else to_device(batch.adapters, self._device)
        tokens, positions = to_device(torch.stack((batch.tokens, batch.positions)), self._device)
        if batch.unread is not None:
            batch.unread.fill(tokens)
        return self._model.forward(Batch(tokens, positions, states=batch.states), self._attend, self._keep(layers))

    def _forward_captured(self, model: Decoder, batch: Batch, layers: frozenset[int]) -> Tensor:
        size, attend = pad_num_tokens(len(batch.tokens)), self._attend
        tokens, positions = self._copy_inputs(batch, size)
        inputs = Batch(tokens, positions, states=self._copy_states(batch, size))
        keep = self._keep(layers, size)
        key = size, attend.buffers, layers, batch.adapters is not None
        has_occurred = key in self._graphs
        graph = self._graphs.pop(key, None)
        if graph is None:
            warmup.count_first_run()
        if has_occurred and graph is None:
            graph = self._capture(lambda: model.forward(inputs, attend, keep))
        self._graphs[key] = graph
        if len(self._graphs) > _MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        if graph is None:
            return model.forward(inputs, attend, keep)
        replay, hidden = graph
        replay()
        return hidden

    def _forward_piecewise(self, model: Decoder, batch: Batch, size: int, layers: frozenset[int]) -> Tensor:
        inputs, keep, num_tokens = self._copy_inputs(batch, size), self._keep(layers, size), len(batch.tokens)
        key = size, layers, batch.adapters is not None
        step = self._piecewise.pop(key, None)
        if step is not None and not step.is_captured:
            warmup.count_first_run()
            step.capture(self._capture)
        is_new = step is None
        if step is None:
            warmup.count_first_run()
            step = PiecewiseStep(model, inputs, keep)
        self._piecewise[key] = step
        if len(self._piecewise) > _MAX_PIECEWISE:
            del self._piecewise[next(iter(self._piecewise))]
        states = None if batch.states is None else model.place_states(batch.states)
        compute = step.run if is_new else step.replay
        return compute(num_tokens, self._attend, states)

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
        copy_to_place(torch.from_numpy(host), inputs)
        self._copy_adapters(batch, size)
        if batch.unread is not None:
            batch.unread.fill(inputs[0])
        return inputs

    def _copy_adapters(self, batch: Batch, size: int) -> None:
        """Copy the adapters of a step's rows to where the graphs of this padded size read them."""
        self._adapter_rows.indices = None
        if batch.adapters is None:
            return
        host = torch.full((size,), NO_ADAPTER, dtype=torch.int64)
        host[: len(batch.adapters)] = batch.adapters
        indices = self._adapters_gpu.get(size)
        if indices is None:
            indices = self._adapters_gpu[size] = torch.empty(size, dtype=torch.int64, device=self._device)
        self._adapter_rows.indices = copy_to_place(host, indices)

    def _copy_states(self, batch: Batch, size: int) -> StateStep | None:
        """Copy a step's segments of states to where the graphs of this padded size read them, with zeros behind."""
        if batch.states is None:
            return None
        host = np.zeros((size, NUM_FIELDS), np.int64)
        host[: len(batch.states.segments)] = batch.states.segments
        table = self._segments_gpu.get(size)
        if table is None:
            table = self._segments_gpu[size] = torch.empty(host.shape, dtype=torch.int64, device=self._device)
        copy_to_place(torch.from_numpy(host), table)
        return replace(batch.states, table=table)
