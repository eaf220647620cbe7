"""Steps with chunks of prompts on a GPU, from a CUDA graph for each piece between two attentions.

The attention of such a step has another shape nearly every time, so it is launched kernel by kernel, and so is what
reads and writes states. All else depends on the number of tokens alone, which is padded to few sizes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.cache.state_layers import LayerStates
from engine.models.decoder import Decoder
from engine.models.interface import Batch, KeepState
from engine.runner.graph_pool import Capture, Replay

SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
"""Padded sizes. In larger steps the GPU takes longer than the host needs to launch its kernels."""


def pad_to_size(num_tokens: int) -> int | None:
    """Return the smallest of the ``SIZES`` that holds so many tokens; ``None`` if there is none."""
    return next((size for size in SIZES if num_tokens <= size), None)


class Exchange:
    """Rows of each layer in tensors of fixed places, which layers with rows of one shape share."""

    def __init__(self, size: int) -> None:
        """``size``: number of rows."""
        self._size = size
        self._by_shape: dict[torch.Size, Tensor] = {}
        self._by_layer: dict[int, Tensor] = {}

    def __getitem__(self, layer: int) -> Tensor:
        return self._by_layer[layer]

    def write(self, layer: int, rows: Tensor) -> None:
        """Write some or all rows of a layer, by its index, the first time to a new place, where the others are zero."""
        place = self._by_layer.get(layer)
        if place is None:
            shape = rows.shape[1:]
            if shape not in self._by_shape:
                self._by_shape[shape] = torch.zeros(self._size, *shape, dtype=rows.dtype, device=rows.device)
            place = self._by_layer[layer] = self._by_shape[shape]
        place[: len(rows)].copy_(rows)


class PiecewiseStep:
    """The steps of one padded size: launched kernel by kernel until they are captured, then replayed.

    Pieces and attention exchange what they compute in tensors of fixed places. Attention reads and writes the rows of
    the step's own tokens alone, so padding never reaches the cache. Layers with states are like those with attention.
    """

    def __init__(self, model: Decoder, inputs: Tensor, keep: KeepState | None) -> None:
        """``inputs``: where tokens and positions ``[2, size]`` are read. ``keep``: keeps hidden states as copies."""
        self._model, self._inputs, self._keep = model, inputs, keep
        size, device = inputs.shape[1], model.device_config.device
        self._qkv, self._attn_out = Exchange(size), Exchange(size)
        """Projections that each layer's attention reads, and its results."""
        self._by_layer: Tensor | None = None
        """Inputs that layers have from the tokens (``StepInputs``), in a tensor that the first run makes."""
        self._angles = [torch.empty(size, table.shape[1], device=device) for table in model.rope_tables]
        self._replays: list[Replay] = []
        self._output: Tensor | None = None
        """Final hidden states of the captured pieces."""

    def run(self, num_tokens: int, attend: FusedAttentionBackend, states: LayerStates | None = None) -> Tensor:
        """Return the final hidden states of a step, kernel by kernel.

        ``attend`` is prepared for ``num_tokens``. ``states``: of a model that has layers with states.
        """
        hidden = self._begin()
        for index in range(self._model.config.num_layers):
            self._attend(index, num_tokens, attend, states)
            hidden = self._continue(index, hidden)
        return hidden

    def capture(self, capture: Capture) -> None:
        """Capture all pieces, in the order in which they are replayed."""
        replay, hidden = capture(self._begin)
        self._replays = [replay]
        for index in range(self._model.config.num_layers):
            # The hidden states before are given up here, and so the graphs after this one reuse their memory.
            replay, hidden = capture(partial(self._continue, index, hidden))
            self._replays.append(replay)
        self._output = hidden

    def replay(self, num_tokens: int, attend: FusedAttentionBackend, states: LayerStates | None = None) -> Tensor:
        """Return the final hidden states of a step, as ``run`` does, from the captured pieces."""
        assert self._output is not None
        begin, *continuations = self._replays
        begin()
        for index, replay in enumerate(continuations):
            self._attend(index, num_tokens, attend, states)
            replay()
        return self._output

    @property
    def is_captured(self) -> bool:
        """True once ``capture`` was called."""
        return self._output is not None

    def _begin(self) -> Tensor:
        """Compute all before the first attention."""
        inputs = self._model.embed_inputs(Batch(*self._inputs))
        for own, computed in zip(self._angles, inputs.angles, strict=True):
            own.copy_(computed)
        if inputs.by_layer is not None:
            if self._by_layer is None:
                self._by_layer = torch.empty_like(inputs.by_layer)
            self._by_layer.copy_(inputs.by_layer)
        self._qkv.write(0, self._model.project_first(inputs.hidden))
        return inputs.hidden

    def _attend(self, index: int, num_tokens: int, attend: FusedAttentionBackend, states: LayerStates | None) -> None:
        """Compute the attention of a layer, by its index."""
        angles = [table[:num_tokens] for table in self._angles]
        qkv = self._qkv[index][:num_tokens]
        self._attn_out.write(index, self._model.attend(index, qkv, angles, attend, states))

    def _continue(self, index: int, hidden: Tensor) -> Tensor:
        """Compute all from the attention of a layer, by its index, to the next one, or to the end."""
        if index == self._model.config.num_layers - 1:
            return self._model.forward_last_mlp(hidden, self._attn_out[index], self._by_layer)
        hidden, qkv = self._model.forward_between(
            index, hidden, self._attn_out[index], keep=self._keep, by_layer=self._by_layer
        )
        self._qkv.write(index + 1, qkv)
        return hidden
