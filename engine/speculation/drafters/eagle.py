"""EAGLE drafter: one decoder layer that predicts the target's next hidden state from its own predictions.

Li et al. 2024, https://arxiv.org/abs/2401.15077; trees: https://arxiv.org/abs/2406.16858, "EAGLE-2".

From the hidden state at a position and the token that follows it, the layer predicts the next hidden state, and the
target's own head computes its logits. From the target it needs final hidden states, the embedding table and the head,
and one more layer of keys and values, with the target's ``kv_heads`` and ``head_dim``, in its pages: slot ``i`` holds
the entry of the hidden state at ``i`` and the token at ``i + 1``. So entries are shared, forked, copied and evicted
with their prefix, without code here.

The last slot of a shared prefix is the exception: its entry depends on the token after the prefix, which may differ
between branches. The last writer wins; the others draft with one wrong entry in their context. Tokens that only score
requests computed, and the last tokens of a finished branch, have no entries. Both may cost acceptance, never
correctness: every draft token is verified.

The entries of a decoding branch's latest tokens are computed when it drafts, or when there are enough of them to be
worth the fixed cost, so a branch without drafts pays little. Entries of draft tokens never go into pages: drafting
copies a branch's entries once and appends those of its draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.cuda_triton import TritonAttention
from engine.attention.layer import LayerAttentionConfig
from engine.attention.paged_tensors import gather_pages, write_kv
from engine.attention.plan import kv_slots
from engine.attention.select import create_cpu_attention
from engine.cache.paged_kv import KVCache, PageTable
from engine.device import DeviceConfig, to_device
from engine.models.interface import Model
from engine.protocol.types import EngineError
from engine.runner.batch import lay_out
from engine.sampling.sampler import Ints
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters.head_config import fits, product, read_head_config, readout
from engine.speculation.drafters.tree_draft import Level, grow_trees
from engine.weights.safetensors import Weights
from kernels.common.rotary import frequencies, rotary, rotary_tables
from kernels.layers.activation import silu_mul

Bools = npt.NDArray[np.bool_]

_GATHERED_FLOATS = 1 << 24
"""Maximum number of copied keys and values (float32, 64 MiB) at once; one branch's may be more."""
_WAITING = 8
"""Maximum number of tokens of a branch without entries."""
_NUMBERS = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("layer_norm_eps", "rope_theta"),
)

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention function from queries, keys and values ``[tokens, heads, head_dim]`` to ``[tokens, heads * head_dim]``."""


def load_eagle(folder: Path, model: Model) -> EagleDrafter:
    """Load the head in ``folder`` (``config.json``, ``model.safetensors``) for a target.

    Raises ``EngineError`` that names what is missing, damaged, left over, or does not fit the target.
    """
    fields = read_head_config(folder, "eagle", model, _NUMBERS)
    target = model.config
    fits(folder / "config.json", "num_key_value_heads", fields["num_key_value_heads"], target.kv_heads)
    fits(folder / "config.json", "head_dim", fields["head_dim"], target.head_dim)
    heads = int(fields["num_attention_heads"])
    if heads % target.kv_heads:
        raise EngineError(f"{folder / 'config.json'}: {heads} heads cannot share {target.kv_heads} key-value heads")
    about = LayerAttentionConfig(heads, target.kv_heads, target.head_dim, target.head_dim**-0.5)
    inner, eps = int(fields["intermediate_size"]), fields["layer_norm_eps"]
    layer = _Layer(Weights(folder), about, target.hidden_size, inner, eps, model.device_config)
    return EagleDrafter(layer, model, theta=fields["rope_theta"])


class _Layer:
    """The head's weights and its forward pass around any attention.

    Attention and feed-forward read the same input in parallel (Wang & Komatsuzaki 2021, GPT-J), so a layer is three
    matrix products and one norm: a small layer's time is its number of operators. Sequential layers draft no better.
    """

    def __init__(
        self,
        weights: Weights,
        about: LayerAttentionConfig,
        hidden: int,
        inner: int,
        eps: float,
        device_config: DeviceConfig,
    ) -> None:
        self.about, self._eps = about, eps
        queries, keys = about.heads * about.head_dim, about.kv_heads * about.head_dim
        attention, mlp = "layer.self_attn.", "layer.mlp."

        def take(name: str, *shape: int) -> Tensor:
            return device_config.convert(weights.take(name, *shape))

        self._norm = take("hidden_norm.weight", hidden)
        self._fuse = product(take("fc.weight", hidden, 2 * hidden))
        parts = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
        parts |= {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        self._input = product(torch.cat([take(f"{name}.weight", rows, hidden) for name, rows in parts.items()]))
        self._heads = queries + 2 * keys
        sides = take(f"{attention}o_proj.weight", hidden, queries), take(f"{mlp}down_proj.weight", hidden, inner)
        self._output = product(torch.cat(sides, dim=1))
        weights.finish()

    def __call__(self, features: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor], attend: _Attend) -> Tensor:
        """Return the next hidden states, from those at some positions and the embeddings of the tokens after them,
        ``[tokens, hidden]`` each."""
        about, normal = self.about, F.layer_norm(features, features.shape[1:], self._norm, None, self._eps)
        hidden = self._fuse(torch.cat((normal, embedded), dim=1))
        inputs = self._input(hidden)
        qkv = inputs[:, : self._heads].view(len(inputs), -1, about.head_dim)
        qk = rotary(qkv[:, : about.heads + about.kv_heads].float(), *angles).to(qkv.dtype)
        mixed = attend(qk[:, : about.heads], qk[:, about.heads :], qkv[:, about.heads + about.kv_heads :])
        return self._output(torch.cat((mixed, silu_mul(inputs[:, self._heads :])), dim=1)).add_(hidden)


class EagleDrafter:
    """A ``Drafter`` with one layer of its own in the target's pages."""

    kind = "eagle"
    layers = 1
    hidden_state_needs = HiddenStateNeeds.ALL

    def __init__(self, layer: _Layer, model: Model, *, theta: float) -> None:
        """``theta``: base of the rotary embedding."""
        self._layer, self._model, self._theta = layer, model, theta
        self._read = readout(model)

    def reset(self, cache: KVCache) -> None:
        vars(self).pop("_waiting", None)  # freed before another one is allocated
        self._cache = cache
        about, device_config = self._layer.about, self._model.device_config
        attention = TritonAttention if device_config.uses_gpu_kernels else create_cpu_attention
        self._attention = attention([about], cache.data[-1:], cache.scales_of(slice(-1, None)))
        positions = cache.page_table.shape[1] * cache.page_size
        cos, sin = rotary_tables(frequencies(about.head_dim, self._theta), positions)
        self._angles = cos.to(device_config.device), sin.to(device_config.device)
        rows = len(cache.page_table)
        shape = rows, _WAITING, self._model.config.hidden_size
        self._waiting = torch.zeros(shape, dtype=device_config.dtype, device=device_config.device)
        """Hidden states without entries, for each row of the page table."""
        self._spans = [_NOTHING] * rows

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        """Store hidden states; the token after each is known from the prompt or was just sampled."""
        due: list[tuple[StepResult, _Span]] = []
        rows: list[int] = []
        places: list[int] = []
        kept: list[int] = []
        for step in steps:
            table, new = step.sequence.pages, len(step.rows)
            span = self._spans[table.row]
            if span.table is not table or span.first + span.length != step.first_position:
                span = _Span(table, step.first_position, 0)
            if span.length + new > _WAITING:
                due.append((step, span))
                continue
            self._spans[table.row] = _Span(table, span.first, span.length + new)
            rows += [table.row] * new
            places += range(span.length, span.length + new)
            kept += step.rows
        if rows:
            self._waiting[rows, places] = hidden[kept]
        if due:
            self._compute(due, hidden)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(requests)
        size = 2 * self._layer.about.kv_heads * self._layer.about.head_dim
        # Branches of similar length draft together, as many as there is memory for.
        known = [index for index, request in enumerate(requests) if self._is_known(request.sequence)]
        known.sort(key=lambda index: len(requests[index].sequence.tokens))
        while known:
            longest = len(requests[known[-1]].sequence.tokens)
            some = known[-max(1, _GATHERED_FLOATS // (longest * size)) :]
            del known[-len(some) :]
            for index, draft in zip(some, self._draft([requests[index] for index in some]), strict=True):
                drafts[index] = draft
        return drafts

    def release(self, sequence: GenerateSequence) -> None:
        """Do nothing: the branch's state is replaced with its row of the page table."""

    def clear_cache(self) -> None:
        """Do nothing: all entries are in the target's pages."""

    def _is_known(self, sequence: GenerateSequence) -> bool:
        """Return True if the hidden states of the branch's latest tokens are stored, all but the last token's, which
        has none."""
        span = self._spans[sequence.pages.row]
        known = span.table is sequence.pages and span.first + span.length == len(sequence.tokens) - 1
        return known and span.length > 0

    def _compute(self, due: Sequence[tuple[StepResult, _Span]], hidden: Tensor) -> None:
        """Compute the entries of stored and new hidden states, all but the last, which waits for a draft."""
        features = [
            torch.cat((self._waiting[span.table.row, : span.length], hidden[step.rows[:-1]])) for step, span in due
        ]
        spans = [_Span(span.table, span.first, len(some)) for (_, span), some in zip(due, features, strict=True)]
        rows, firsts, queries = np.array([(span.table.row, span.first, span.length) for span in spans]).T
        layout = lay_out(self._cache, self._layer.about, rows, queries, firsts + queries, {})
        self._attention.prepare(layout)
        embedded = self._model.embed(torch.tensor(_successors([step.sequence for step, _ in due], spans)))
        angles = self._at(layout.token_indices)
        self._layer(torch.cat(features), embedded, angles, lambda q, k, v: self._attention(0, q, k, v))
        self._waiting[rows, 0] = hidden[[step.rows[-1] for step, _ in due]]
        for row, span in zip(rows.tolist(), spans, strict=True):
            self._spans[row] = _Span(span.table, span.first + span.length, 1)

    def _draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        sequences = [request.sequence for request in requests]
        spans = [self._spans[one.pages.row] for one in sequences]
        entries = _Entries(spans, requests, self._cache, self._layer.about, self._model.device_config)
        embedded = self._model.embed(torch.tensor(_successors(sequences, spans)))
        features = torch.cat([self._waiting[span.table.row, : span.length] for span in spans])
        predicted = self._layer(features, embedded, self._at(entries.positions), entries.attend)
        entries.publish(self._cache)
        for span in spans:
            self._spans[span.table.row] = _Span(span.table, span.first + span.length, 0)
        predicted = predicted[entries.last]

        def follow(level: Level) -> Tensor:
            nonlocal predicted
            entries.append(level)
            embedded = self._model.embed(torch.from_numpy(level.tokens))
            angles = self._at(entries.positions)
            predicted = self._layer(predicted[level.parents], embedded, angles, entries.attend)
            return self._read(predicted)

        return grow_trees(requests, self._read(predicted), follow)

    def _at(self, positions: Ints) -> tuple[Tensor, Tensor]:
        cos, sin = self._angles
        where = torch.from_numpy(positions)
        return cos[where], sin[where]


class _Span(NamedTuple):
    """Consecutive tokens of a branch."""

    table: PageTable
    first: int
    length: int


_NOTHING = _Span(PageTable(-1, [], None, None, 0, 0), 0, 0)


def _successors(sequences: Sequence[GenerateSequence], spans: Sequence[_Span]) -> list[int]:
    """Return the token after each token of the spans."""
    return [
        token
        for one, (_, first, count) in zip(sequences, spans, strict=True)
        for token in one.tokens[first + 1 : first + 1 + count]
    ]


class _Entries:
    """Entries that the draft tokens of some branches attend to: a copy of the branches' entries, then those that were
    still missing, then those of draft tokens, level by level.

    A level's rows are the queries of their branches and add an entry each. Branches with fewer rows are padded.
    """

    def __init__(
        self,
        spans: Sequence[_Span],
        requests: Sequence[DraftRequest],
        cache: KVCache,
        about: LayerAttentionConfig,
        device_config: DeviceConfig,
    ) -> None:
        """Start with the spans, which are chains of missing entries, as the first level."""
        self._about, self._spans, self._count = about, spans, len(spans)
        rows, firsts, counts = np.array([(span.table.row, span.first, span.length) for span in spans]).T
        self._ends = firsts + counts
        self._end = int(firsts.max())
        depth, wide = max(request.depth for request in requests), max(_width(request) for request in requests)
        pages = -(-self._end // cache.page_size)
        room = self._end + int(counts.max()) + (depth - 1) * wide
        shape = 2, about.kv_heads, self._count, room, about.head_dim
        self._kv = torch.empty(shape, dtype=device_config.dtype, device=device_config.device)
        if pages:
            heads = cache.pool.size * np.arange(2 * about.kv_heads)[:, None]
            chosen = torch.from_numpy((heads + cache.page_table[rows, :pages].reshape(-1)).reshape(-1))
            own = self._kv.new_empty(len(chosen), cache.page_size * about.head_dim)
            gather_pages(cache.data[-1], cache.scales_of(-1), to_device(chosen, device_config.device), own)
            own = own.view(2, about.kv_heads, self._count, pages * cache.page_size, about.head_dim)
            self._kv[:, :, :, : self._end] = own[:, :, :, : self._end]
        branches = np.arange(self._count).repeat(counts)
        self.last = counts.cumsum() - 1
        """Row of each branch's last missing entry."""
        which = np.arange(len(branches)) - (self.last + 1 - counts)[branches]
        self.positions: Ints = firsts[branches] + which
        """Positions of the latest level's rows."""
        sees = np.arange(self._end) < firsts[branches, None]
        self._add(branches, which, sees, which[:, None] >= np.arange(int(counts.max())))
        self._guessed = 0

    def append(self, level: Level) -> None:
        """Add room for the entries of a level's draft tokens."""
        branches = level.branches
        which = np.arange(len(branches)) - np.searchsorted(branches, branches)
        self.positions = self._ends[branches] + self._guessed
        before = self._sees if self._guessed else self._sees[self.last]
        self._add(branches, which, before[level.parents], which[:, None] == np.arange(int(which.max()) + 1))
        self._guessed += 1

    def _add(self, branches: Ints, which: Ints, before: Bools, own: Bools) -> None:
        """Add a level. ``which`` ``[rows]``: index of each row within its branch; ``before`` and ``own``: the earlier
        entries and the level's entries that each row sees."""
        self._wide = own.shape[1]
        self._places = branches * self._wide + which
        self._padded = len(branches) < self._count * self._wide
        self._sees = np.concatenate((before, own), axis=1)
        self._end += self._wide

    def publish(self, cache: KVCache) -> None:
        """Write the missing entries into the branches' pages, after their level was attended to."""
        size, kv = cache.page_size, self._kv[:, :, :, self._end - self._wide : self._end].flatten(2, 3).transpose(1, 2)
        rows = np.array([span.table.row for span in self._spans])[self._places // self._wide]
        page, offset = np.divmod(self.positions, size)
        slots = kv_slots(cache.page_table[rows, page] * size + offset, cache.pool.size * size, self._about.kv_heads)
        k, v = kv[:, self._places] if self._padded else kv
        write_kv(cache.data[-1], cache.scales_of(-1), to_device(torch.from_numpy(slots), k.device), k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the attention of the level's rows: ``q`` ``[rows, heads, head_dim]``, ``k`` and ``v`` ``[rows,
        kv_heads, head_dim]``."""
        about, count, wide = self._about, self._count, self._wide
        new = self._kv[:, :, :, self._end - wide : self._end]
        new[0] = self._spread(k).permute(2, 0, 1, 3)
        new[1] = self._spread(v).permute(2, 0, 1, 3)
        own = self._spread(q).view(count, wide, about.kv_heads, -1, about.head_dim).permute(2, 0, 3, 1, 4)
        keys, values = self._kv[:, :, :, : self._end]
        mask = None if self._sees.all() else to_device(self._mask(), keys.device)
        mixed = F.scaled_dot_product_attention(own.flatten(2, 3), keys, values, mask, scale=about.scale)
        mixed = mixed.view(about.kv_heads, count, -1, wide, about.head_dim).permute(1, 3, 0, 2, 4)
        mixed = mixed.reshape(count * wide, -1)
        return mixed[self._places] if self._padded else mixed

    def _spread(self, x: Tensor) -> Tensor:
        """Reshape ``[rows, n, head_dim]`` to ``[branches, wide, n, head_dim]``, with zeros where a branch has fewer
        rows."""
        shape = (self._count, self._wide, *x.shape[1:])
        if not self._padded:
            return x.reshape(shape)
        spread = x.new_zeros(shape)
        spread.flatten(0, 1)[self._places] = x
        return spread

    def _mask(self) -> Tensor:
        """Return the mask ``[1, branches, heads_per_kv * wide, entries]``, in the layout of ``attend``."""
        mask = np.zeros((self._count * self._wide, self._end), np.bool_)
        mask[:, 0] = True  # a padded query must attend to an entry, otherwise its softmax is NaN
        mask[self._places] = self._sees
        heads = self._about.heads // self._about.kv_heads
        each = torch.from_numpy(mask).view(self._count, 1, self._wide, self._end)
        return each.expand(-1, heads, -1, -1).flatten(1, 2)[None]


def _width(request: DraftRequest) -> int:
    """Return the maximum number of draft tokens of a level."""
    return 1 if request.nodes == request.depth else request.nodes
