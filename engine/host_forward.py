"""One step's way through a model's layers on the CPU."""

from __future__ import annotations

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
_MOST_LOGITS = 1 << 17
"""Logits that are made by a tape, which keeps the memory for them."""


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
        self._most_read = 0
        """Rows that are read from a tape."""
        self._angles: list[Tensor] = []
        """Of a step's positions. What a tape takes for memory lasts for a layer, but all layers read these."""
        if isinstance(model, Decoder) and is_compiled(model.config.attention[0], kv) and model.repeatable:
            self._repeatable = model
            self._most_read = _MOST_LOGITS // model.config.vocab if model.read_repeatable else 0
            self._angles = [torch.empty(_MOST, table.shape[1]) for table in model.rotations]
        self._inputs = torch.empty(2, _MOST, dtype=torch.int64)
        """Tokens and positions, where tapes read them."""
        self._filled = self._inputs.numpy()
        self._hidden = torch.empty(0)
        """What the last call returned."""
        self.tapes = Tapes()
        """By tokens and threads."""
        self._reads = Tapes()
        """By the address of what is read, too."""

    def __call__(self, batch: Batch, rows: Rows) -> Tensor:
        """See ``Forward``. What it returns is valid until the next call."""
        self._attend.prepare(rows)
        model, tokens = self._repeatable, batch.tokens.shape[0]
        if model is None or tokens > _MOST:
            return self._model.forward(batch, self._attend)
        self._filled[0, :tokens], self._filled[1, :tokens] = batch.tokens.numpy(), batch.positions.numpy()
        key = tokens, torch.get_num_threads()
        self._hidden = self.tapes(key, lambda: self._compute(model, *self._inputs[:, :tokens]))
        return self._hidden

    def read(self, hidden: Tensor) -> Tensor:
        """``Model.read``. All hidden states of the last call are read from a tape: their memory is always the same."""
        rows = hidden.shape[0]
        if hidden is not self._hidden or rows > self._most_read:
            return self._model.read(hidden)
        key = hidden.data_ptr(), rows, torch.get_num_threads()
        return self._reads(key, lambda: self._model.read(hidden))

    def _compute(self, model: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
        from kernels.cpu.chain import rows_of

        hidden = rows_of(model.embedding, tokens, scale=model.config.embedding_scale)
        angles = [
            rows_of(table, positions, out=held[: len(tokens)])
            for table, held in zip(model.rotations, self._angles, strict=True)
        ]
        return model.layers(hidden, angles, self._attend)
