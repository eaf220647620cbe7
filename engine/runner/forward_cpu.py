"""One step's way through a model's layers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.layer import has_compiled_kernel
from engine.attention.plan import AttentionMetadata
from engine.attention.select import CpuAttention
from engine.models.decoder import Decoder
from engine.models.interface import Batch, Model
from engine.runner.fused_sampler_cpu import FusedCpuSampler
from engine.sampling.sampler import Floats, Ints
from engine.scheduler.sequence import GenerateSequence
from kernels.cpu.runtime.kernel_graph import KernelGraphCache

_MOST = 128
"""Tokens of a step that is repeated from a tape. In larger ones Python is not what takes time."""
_MOST_LOGITS = 1 << 20
"""Logits that are drawn from in a tape, which keeps the memory for them."""


class CpuForward:
    """A ``Forward``.

    The layers of a small step are recorded when its number of tokens is met first, and then repeated: all that changes
    from step to step lies in memory that stays where it is.
    """

    def __init__(self, model: Model, attend: CpuAttention, kv: Tensor, rows: int) -> None:
        """``attend``: the attention over ``kv``. ``rows``: of the cache's page table."""
        self._model = model
        self._attend = attend
        self._inputs = torch.empty(2, _MOST, dtype=torch.int64)
        """Tokens and positions, where tapes read them."""
        self._filled = self._inputs.numpy()
        self._repeatable: Decoder | None = None
        self._draws: FusedCpuSampler | None = None
        self._most_drawn = 0
        """Rows that it draws."""
        self._angles: list[Tensor] = []
        """Of a step's positions. What a tape takes for memory lasts for a layer, but all layers read these."""
        if isinstance(model, Decoder) and has_compiled_kernel(model.config.attention[0], kv) and model.is_recordable:
            self._repeatable = model
            if model.is_head_recordable:
                self._draws = FusedCpuSampler(model, self._inputs[1], rows)
                self._most_drawn = min(_MOST, _MOST_LOGITS // model.config.vocab_size)
            self._angles = [torch.empty(_MOST, table.shape[1]) for table in model.rope_tables]
        self._hidden = torch.empty(0)
        """What the last call returned."""
        self.tapes: KernelGraphCache[Tensor] = KernelGraphCache()
        """By tokens and threads."""
        self._beginnings: KernelGraphCache[tuple[Tensor, Tensor]] = KernelGraphCache()
        self._ends: KernelGraphCache[Tensor] = KernelGraphCache()
        """Of steps of which not all is read. Each beginning may have any end, which finds its rows where they are
        copied to."""
        self._read = torch.empty(_MOST, dtype=torch.int64)
        about = model.config.attention[0]
        widths = (self._repeatable.embedding.shape[1], about.heads * about.head_dim) if self._repeatable else ()
        self._chosen = [torch.empty(_MOST, width) for width in widths]

    def __call__(self, batch: Batch, rows: AttentionMetadata, read: Sequence[int] | None = None) -> Tensor:
        """See ``Forward``. What it returns is valid until the next call."""
        self._attend.prepare(rows)
        model, tokens = self._repeatable, batch.tokens.shape[0]
        if model is None:
            hidden = self._model.forward(batch, self._attend)
            return hidden if read is None else hidden[torch.tensor(read, dtype=torch.int64)]
        if tokens <= _MOST:
            self._filled[0, :tokens], self._filled[1, :tokens] = batch.tokens.numpy(), batch.positions.numpy()
        if read is not None:
            return self._end(model, *self._begin(model, batch), batch, read)
        if tokens > _MOST:
            return model.forward(batch, self._attend)
        self._hidden = self.tapes(
            (tokens, torch.get_num_threads()), lambda: model.forward_layers(*self._given(model, tokens), self._attend)
        )
        return self._hidden

    def draw(
        self, hidden: Tensor, branches: Sequence[GenerateSequence], counts: Sequence[int]
    ) -> tuple[Tensor, Ints, Floats] | None:
        """See ``Forward``."""
        if self._draws is None or hidden is not self._hidden or hidden.shape[0] > self._most_drawn:
            return None
        return self._draws(hidden, branches, counts)

    def _begin(self, model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
        """``Decoder.forward_until_last_attention``."""
        tokens = batch.tokens.shape[0]
        if tokens > _MOST:
            return model.forward_until_last_attention(*model.embed_inputs(batch), self._attend)
        return self._beginnings(
            (tokens, torch.get_num_threads()),
            lambda: model.forward_until_last_attention(*self._given(model, tokens), self._attend),
        )

    def _end(self, model: Decoder, hidden: Tensor, mixed: Tensor, batch: Batch, read: Sequence[int]) -> Tensor:
        """``Decoder.forward_last_mlp``, of the rows to read."""
        from kernels.cpu.sampling.draft_chain import gather_rows

        count = len(read)
        if not 0 < count <= _MOST:
            which = torch.tensor(read, dtype=torch.int64)
            return model.forward_last_mlp(hidden[which], mixed[which]) if count else hidden[:0]
        which = self._read[:count]
        which.numpy()[:] = read
        # The tokens' places are not needed any more. Draws take those of what was read.
        self._filled[1, :count] = batch.positions.numpy()[read]
        taken = [
            gather_rows(table, which, out=held[:count])
            for table, held in zip((hidden, mixed), self._chosen, strict=True)
        ]
        self._hidden = self._ends((count, torch.get_num_threads()), lambda: model.forward_last_mlp(*taken))
        return self._hidden

    def _given(self, model: Decoder, count: int) -> tuple[Tensor, list[Tensor]]:
        """``Decoder.embed_inputs``, of what was filled in."""
        from kernels.cpu.sampling.draft_chain import gather_rows

        tokens, positions = self._inputs[:, :count]
        hidden = gather_rows(model.embedding, tokens, scale=model.config.embedding_scale)
        angles = [
            gather_rows(table, positions, out=held[:count])
            for table, held in zip(model.rope_tables, self._angles, strict=True)
        ]
        return hidden, angles
