"""The forward pass on the CPU, from recorded kernels for small steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from engine.adapters.products import AdapterRows
from engine.attention.plan import AttentionMetadata
from engine.attention.select import CpuAttention
from engine.cache.state_layers import NUM_FIELDS, LayerStates
from engine.models.decoder import Decoder, StepInputs
from engine.models.interface import Batch, KeepState, Model
from engine.runner.fused_sampler_cpu import FusedCpuSampler
from kernels.cpu.runtime.kernel_graph import KernelGraphCache
from kernels.layers.elementwise import write
from kernels.linear.low_rank import NO_ADAPTER

_MAX_RECORDED_TOKENS = 128
"""Maximum number of tokens of a recorded step. In larger steps the interpreter's share of the time is small."""


class CpuForward:
    """A ``Forward`` on the CPU.

    The layers of a small step are recorded the first time its number of tokens occurs, and replayed from then on: all
    that changes from step to step is read from buffers that stay in place.
    """

    def __init__(self, model: Model, attend: CpuAttention, *, num_rows: int, is_compiled: bool) -> None:
        """``num_rows``: rows of the cache's page table. ``is_compiled``: True if ``attend`` is compiled kernels."""
        self._model = model
        self._attend = attend
        self._inputs = torch.empty(2, _MAX_RECORDED_TOKENS, dtype=torch.int64)
        """Tokens and positions that recorded kernels read."""
        self._inputs_numpy = self._inputs.numpy()
        self._segments = torch.zeros(_MAX_RECORDED_TOKENS, NUM_FIELDS, dtype=torch.int64)
        """Segments of states, none of which is without tokens, then as many zeros as there may be segments."""
        self._segments_numpy = self._segments.numpy()
        self._decoder: Decoder | None = None
        """The model, if its layers can be recorded."""
        self.fused_sampler: FusedCpuSampler | None = None
        self._angles: list[Tensor] = []
        """Rotary angles of a step's positions, for all layers (memory of a recorded kernel lasts for one layer)."""
        if isinstance(model, Decoder) and is_compiled and model.is_recordable:
            self._decoder = model
            if model.is_head_recordable:
                self.fused_sampler = FusedCpuSampler(model, self._inputs[1], num_rows)
            self._angles = [torch.empty(_MAX_RECORDED_TOKENS, table.shape[1]) for table in model.rope_tables]
        self._by_layer: Tensor | None = None
        """Inputs of all layers of a recorded step, ``[layers, tokens, input]``, if they have any from the tokens."""
        self._step_by_layer: Tensor | None = None
        """The same inputs of the step that is being computed."""
        self.graphs: KernelGraphCache[Tensor] = KernelGraphCache()
        """Recorded steps of which all hidden states are read, by number of tokens and threads."""
        self._first_parts: KernelGraphCache[tuple[Tensor, Tensor]] = KernelGraphCache()
        """Steps of which some hidden states are read, up to the last attention, by number of tokens and threads."""
        self._last_parts: KernelGraphCache[Tensor] = KernelGraphCache()
        """The last feed-forward of such steps, by number of hidden states and threads, over ``_selected``."""
        self._selection = torch.empty(_MAX_RECORDED_TOKENS, dtype=torch.int64)
        self._selected: list[Tensor] = []
        """Rows to read of the residual stream, of the last attention's output, and of the last layer's inputs."""
        self.kept: Mapping[int, Tensor] = {}
        self._kept_buffers: dict[int, Tensor] = {}
        """Hidden states after each layer that a recorded step keeps."""
        self._all_rows = torch.arange(_MAX_RECORDED_TOKENS)
        self._adapter_rows = AdapterRows()
        """The place from which the model reads the adapters of a step's rows."""
        if isinstance(model, Decoder) and model.adapters is not None:
            self._adapter_rows = model.adapters.rows
        self._adapters = torch.full((2, _MAX_RECORDED_TOKENS), NO_ADAPTER, dtype=torch.int64)
        """Adapters of all rows of a recorded step, and of the rows to read."""

    def __call__(
        self,
        batch: Batch,
        rows: AttentionMetadata,
        read: Sequence[int] | None = None,
        layers: frozenset[int] = frozenset(),
    ) -> Tensor:
        self._attend.prepare(rows)
        self._set_adapters(batch.adapters, 0)
        model, num_tokens = self._decoder, batch.tokens.shape[0]
        if model is None:
            hidden = self._model.forward(batch, self._attend, self._keep(layers))
            return hidden if read is None else hidden[torch.tensor(read, dtype=torch.int64)]
        if num_tokens <= _MAX_RECORDED_TOKENS:
            self._inputs_numpy[0, :num_tokens] = batch.tokens.numpy()
            self._inputs_numpy[1, :num_tokens] = batch.positions.numpy()
            if batch.states is not None:
                self._segments_numpy[:num_tokens] = 0
                self._segments_numpy[: len(batch.states.segments)] = batch.states.segments
        if read is not None:
            return self._compute_last_part(model, *self._compute_first_part(model, batch, layers), batch, read)
        if num_tokens > _MAX_RECORDED_TOKENS:
            return model.forward(batch, self._attend, self._keep(layers))
        keep = self._copy(layers, num_tokens)
        hidden = self.graphs(
            self._key(num_tokens, layers),
            lambda: model.forward_layers(self._embed(model, batch), self._attend, keep),
        )
        return self._expose(hidden)

    def _key(self, num_rows: int, layers: frozenset[int] = frozenset()) -> Hashable:
        """Return the key of the recording of a step of so many rows."""
        key = num_rows, torch.get_num_threads(), layers
        return key if self._adapter_rows.indices is None else (*key, "adapters")

    def _set_adapters(self, indices: Tensor | None, part: int) -> None:
        """Let the model read the rows' adapters, in a small step from where its recording does.

        ``part``: 0 for all rows of the step, 1 for those to read.
        """
        if indices is not None and len(indices) <= _MAX_RECORDED_TOKENS:
            place = self._adapters[part, : len(indices)]
            indices = place.copy_(indices)
        self._adapter_rows.indices = indices

    def _keep(self, layers: frozenset[int]) -> KeepState | None:
        """Return a function that keeps the hidden states of a step that is not recorded."""
        if not layers:
            return None
        kept: dict[int, Tensor] = {}
        self.kept = kept

        def keep(layer: int, hidden: Tensor) -> None:
            if layer in layers:
                kept[layer] = hidden

        return keep

    def _copy(self, layers: frozenset[int], num_tokens: int) -> KeepState | None:
        """Return a function that records a copy of the hidden states to where each replay leaves them."""
        if not layers:
            return None
        from kernels.cpu.sampling.draft_chain import gather_rows

        for layer in layers - self._kept_buffers.keys():
            self._kept_buffers[layer] = torch.empty(_MAX_RECORDED_TOKENS, self._model.config.hidden_size)
        self.kept = kept = {layer: self._kept_buffers[layer][:num_tokens] for layer in layers}

        def keep(layer: int, hidden: Tensor) -> None:
            if layer in kept:
                gather_rows(hidden, self._all_rows[:num_tokens], out=kept[layer])

        return keep

    def _expose(self, hidden: Tensor) -> Tensor:
        """Let the fused sampler read hidden states that recorded kernels wrote."""
        if self.fused_sampler is not None:
            self.fused_sampler.hidden = hidden
        return hidden

    def _compute_first_part(self, model: Decoder, batch: Batch, layers: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Compute a step up to its last attention; see ``Decoder.forward_until_last_attention``."""
        num_tokens = batch.tokens.shape[0]
        if num_tokens > _MAX_RECORDED_TOKENS:
            inputs = model.embed_inputs(batch)
            self._step_by_layer = inputs.by_layer
            return model.forward_until_last_attention(inputs, self._attend, self._keep(layers))
        keep = self._copy(layers, num_tokens)
        result = self._first_parts(
            self._key(num_tokens, layers),
            lambda: model.forward_until_last_attention(self._embed(model, batch), self._attend, keep),
        )
        self._step_by_layer = None if self._by_layer is None else self._by_layer[:, :num_tokens]
        return result

    def _compute_last_part(
        self, model: Decoder, hidden: Tensor, attn_out: Tensor, batch: Batch, read: Sequence[int]
    ) -> Tensor:
        """Compute the hidden states to ``read`` after the first part; see ``Decoder.forward_last_mlp``."""
        from kernels.cpu.sampling.draft_chain import gather_rows

        count, by_layer = len(read), self._step_by_layer
        if batch.adapters is not None:
            self._set_adapters(batch.adapters[torch.tensor(read, dtype=torch.int64)], 1)
        tables = [hidden, attn_out] + ([] if by_layer is None else [by_layer[-1].contiguous()])
        if not 0 < count <= _MAX_RECORDED_TOKENS:
            indices = torch.tensor(read, dtype=torch.int64)
            return _finish_rows(model, [table[indices] for table in tables]) if count else hidden[:0]
        indices = self._selection[:count]
        indices.numpy()[:] = read
        # The positions of all tokens are not needed any more; the fused sampler reads those of the selected ones.
        self._inputs_numpy[1, :count] = batch.positions.numpy()[read]
        self._selected = self._selected or [torch.empty(_MAX_RECORDED_TOKENS, table.shape[1]) for table in tables]
        selected = [
            gather_rows(table, indices, out=buffer[:count])
            for table, buffer in zip(tables, self._selected, strict=True)
        ]
        return self._expose(self._last_parts(self._key(count), lambda: _finish_rows(model, selected)))

    def _embed(self, model: Decoder, batch: Batch) -> StepInputs:
        """Compute ``Decoder.embed_inputs`` of a batch from the input buffers."""
        from kernels.cpu.sampling.draft_chain import gather_rows

        num_tokens = batch.tokens.shape[0]
        tokens, positions = self._inputs[:, :num_tokens]
        hidden = model.embedding(tokens, model.config.embedding_scale)
        angles = [
            gather_rows(table, positions, out=buffer[:num_tokens])
            for table, buffer in zip(model.rope_tables, self._angles, strict=True)
        ]
        states = None if batch.states is None else LayerStates(batch.states.layers, self._segments[:num_tokens])
        by_layer = model.compute_layer_inputs(tokens, hidden)
        if by_layer is not None:
            if self._by_layer is None:
                self._by_layer = torch.empty(len(by_layer), _MAX_RECORDED_TOKENS, by_layer.shape[2])
            write(self._by_layer[:, :num_tokens], by_layer)
            by_layer = self._by_layer[:, :num_tokens]
        return StepInputs(hidden, angles, states, by_layer)


def _finish_rows(model: Decoder, rows: Sequence[Tensor]) -> Tensor:
    """Return ``Decoder.forward_last_mlp`` of rows of the hidden states, the attention and the last layer's inputs."""
    hidden, attn_out, *inputs = rows
    return model.forward_last_mlp(hidden, attn_out, inputs[0][None] if inputs else None)
