"""One step's way through a model's layers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import is_compiled
from engine.attention.host import HostAttention
from engine.attention.plan import Rows
from engine.host_draws import HostDraws
from engine.models.decoder import Decoder
from engine.models.model import Batch, Model
from engine.sampling import Floats, Ints
from engine.sequence import GenerateSequence
from kernels.cpu.tape import Tapes

_MOST = 128
"""Tokens of a step that is repeated from a tape. In larger ones Python is not what takes time."""
_MOST_LOGITS = 1 << 20
"""Logits that are drawn from in a tape, which keeps the memory for them."""


class HostForward:
    """A ``Forward``.

    The layers of a small step are recorded when its number of tokens is met first, and then repeated: all that changes
    from step to step lies in memory that stays where it is.
    """

    def __init__(self, model: Model, attend: HostAttention, kv: Tensor, rows: int) -> None:
        """``attend``: the attention over ``kv``. ``rows``: of the cache's page table."""
        self._model = model
        self._attend = attend
        self._inputs = torch.empty(2, _MOST, dtype=torch.int64)
        """Tokens and positions, where tapes read them."""
        self._filled = self._inputs.numpy()
        self._repeatable: Decoder | None = None
        self._draws: HostDraws | None = None
        self._most_drawn = 0
        """Rows that it draws."""
        self._angles: list[Tensor] = []
        """Of a step's positions. What a tape takes for memory lasts for a layer, but all layers read these."""
        if isinstance(model, Decoder) and is_compiled(model.config.attention[0], kv) and model.repeatable:
            self._repeatable = model
            if model.read_repeatable:
                self._draws = HostDraws(model, self._inputs[1], rows)
                self._most_drawn = min(_MOST, _MOST_LOGITS // model.config.vocab)
            self._angles = [torch.empty(_MOST, table.shape[1]) for table in model.rotations]
        self._hidden = torch.empty(0)
        """What the last call returned."""
        self.tapes = Tapes()
        """By tokens and threads."""

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

    def draw(
        self, hidden: Tensor, branches: Sequence[GenerateSequence], counts: Sequence[int]
    ) -> tuple[Tensor, Ints, Floats] | None:
        """See ``Forward``."""
        if self._draws is None or hidden is not self._hidden or hidden.shape[0] > self._most_drawn:
            return None
        return self._draws(hidden, branches, counts)

    def _compute(self, model: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
        from kernels.cpu.chain import rows_of

        hidden = rows_of(model.embedding, tokens, scale=model.config.embedding_scale)
        angles = [
            rows_of(table, positions, out=held[: len(tokens)])
            for table, held in zip(model.rotations, self._angles, strict=True)
        ]
        return model.layers(hidden, angles, self._attend)
