"""One step's way through a model's layers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import is_compiled
from engine.attention.host import HostAttention
from engine.attention.plan import Rows
from engine.models.decoder import Decoder
from engine.models.model import Batch, Model
from kernels.cpu.tape import Arena, Tape

_MOST = 64
"""Tokens of a step that is repeated from a tape. In larger ones Python is not what takes time."""


class HostForward:
    """A ``Forward``.

    The layers of a small step are recorded when its number of tokens is met for the second time, and then repeated:
    all that changes from step to step lies in memory that stays where it is.
    """

    def __init__(self, model: Model, attend: HostAttention, kv: Tensor) -> None:
        """``attend``: the attention over ``kv``."""
        self._model = model
        self._attend = attend
        self._repeatable: Decoder | None = None
        if isinstance(model, Decoder) and is_compiled(model.config.attention[0], kv) and model.repeatable:
            self._repeatable = model
        self._arena = Arena()
        self._inputs: list[Tensor] = []
        self._tapes: dict[tuple[int, int], tuple[Tape, Tensor] | None] = {}
        """With what they leave, by tokens and threads; ``None``: met once."""

    def __call__(self, batch: Batch, rows: Rows) -> Tensor:
        """See ``Forward``. What it returns is valid until the next call."""
        self._attend.prepare(rows)
        model, key = self._repeatable, (len(batch.tokens), torch.get_num_threads())
        if model is None or len(batch.tokens) > _MOST:
            return self._model.forward(batch, self._attend)
        hidden, angles = model.inputs(batch)
        if key not in self._tapes:
            self._tapes[key] = None
            return model.layers(hidden, angles, self._attend)
        inputs = self._fill([hidden, *angles])
        known = self._tapes[key]
        if known is None:
            known = self._tapes[key] = self._record(model, inputs)
        else:
            known[0].repeat()
        return known[1]

    def _fill(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Writes a step's inputs to where tapes read them."""
        if not self._inputs:
            self._inputs = [torch.empty(_MOST, value.shape[1]) for value in values]
        views = [held[: len(value)] for held, value in zip(self._inputs, values, strict=True)]
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        return views

    def _record(self, model: Decoder, inputs: Sequence[Tensor]) -> tuple[Tape, Tensor]:
        hidden, *angles = inputs
        while True:
            tape = Tape(self._arena)
            try:
                return tape, tape.record(lambda: model.layers(hidden, angles, self._attend))
            except MemoryError:
                self._arena.grow()
                self._tapes.clear()
