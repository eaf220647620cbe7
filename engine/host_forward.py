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
from kernels.cpu.tape import Tapes

_MOST = 64
"""Tokens of a step that is repeated from a tape. In larger ones Python is not what takes time."""


class HostForward:
    """A ``Forward``.

    The layers of a small step are recorded when its number of tokens is met first, and then repeated: all that changes
    from step to step lies in memory that stays where it is.
    """

    def __init__(self, model: Model, attend: HostAttention, kv: Tensor) -> None:
        """``attend``: the attention over ``kv``."""
        self._model = model
        self._attend = attend
        self._repeatable: Decoder | None = None
        if isinstance(model, Decoder) and is_compiled(model.config.attention[0], kv) and model.repeatable:
            self._repeatable = model
        self._inputs: list[Tensor] = []
        self.tapes = Tapes()
        """By tokens and threads."""

    def __call__(self, batch: Batch, rows: Rows) -> Tensor:
        """See ``Forward``. What it returns is valid until the next call."""
        self._attend.prepare(rows)
        model, tokens = self._repeatable, len(batch.tokens)
        if model is None or tokens > _MOST:
            return self._model.forward(batch, self._attend)
        hidden, angles = model.inputs(batch)
        hidden, *angles = self._fill([hidden, *angles])
        return self.tapes((tokens, torch.get_num_threads()), lambda: model.layers(hidden, angles, self._attend))

    def _fill(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Writes a step's inputs to where tapes read them."""
        if not self._inputs:
            self._inputs = [torch.empty(_MOST, value.shape[1]) for value in values]
        views = [held[: len(value)] for held, value in zip(self._inputs, values, strict=True)]
        for view, value in zip(views, values, strict=True):
            view.copy_(value)
        return views
