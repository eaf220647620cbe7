"""EAGLE: one decoder layer behind the target's last one guesses the next hidden state, and so on from its own guesses
(Li et al. 2024, https://arxiv.org/abs/2401.15077; its trees: https://arxiv.org/abs/2406.16858, "EAGLE-2").

From the hidden state at a position and the token that follows it, the layer predicts the next hidden state; the
target's own head reads that. What it needs of the target: final hidden states, the embedding table and the head
(``Model.embed``, ``Model.read``), and room for one more layer of keys and values, with the target's ``kv_heads`` and
``head_dim``, in its pages: slot ``i`` holds the entry of the hidden state at ``i`` and the token at ``i + 1``. So what
is shared, forked, copied or evicted of a prefix takes the layer's entries along, and none of that needs code here.

The last slot of a shared prefix is the exception: its entry names the token behind the prefix, and branches that share
the prefix may differ there. Whoever wrote it last decides; the others draft with one wrong entry in their context.
Likewise for tokens that only score requests computed and for the last tokens of a branch that ended, which have no
entries. That may cost acceptance, never more: every guess is verified.

Entries of guesses never go into pages. Drafting copies a branch's entries once and adds those of its guesses behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention import LayerAttention
from engine.attention.plan import CostModel, Rows
from engine.attention.torch_backend import TorchAttention
from engine.cache.kv import KVCache
from engine.models.model import Model
from engine.models.weights import Weights
from engine.sequence import GenerateSequence
from engine.speculation.draft import EMPTY, Advance, Draft, Wish
from engine.speculation.grow import Level, grow
from engine.speculation.heads import LastStates, fits, product, read_head_config
from engine.support import Ints
from engine.types import EngineError
from kernels.activation import silu_mul
from kernels.rotary import frequencies, rotary, rotary_tables

_GATHERED_FLOATS = 1 << 24
"""Copied keys and values of this many float32 (64 MiB) at once; one branch's may be more."""
_NUMBERS = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("layer_norm_eps", "rope_theta"),
)

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries, keys and values ``[tokens, heads, head_dim]`` to ``[tokens, heads * head_dim]``."""


def load_eagle(folder: Path, model: Model) -> EagleDrafter:
    """The head in ``folder`` (``config.json``, ``model.safetensors``) for a target.

    Raises ``EngineError`` that names what is missing, damaged, left over, or does not fit the target.
    """
    fields = read_head_config(folder, "eagle", model, _NUMBERS)
    target = model.config
    fits(folder / "config.json", "num_key_value_heads", fields["num_key_value_heads"], target.kv_heads)
    fits(folder / "config.json", "head_dim", fields["head_dim"], target.head_dim)
    heads = int(fields["num_attention_heads"])
    if heads % target.kv_heads:
        raise EngineError(f"{folder / 'config.json'}: {heads} heads cannot share {target.kv_heads} key-value heads")
    about = LayerAttention(heads, target.kv_heads, target.head_dim, target.head_dim**-0.5)
    layer = _Layer(Weights(folder), about, target.hidden, int(fields["intermediate_size"]), fields["layer_norm_eps"])
    return EagleDrafter(layer, model, theta=fields["rope_theta"])


class _Layer:
    """The head's weights, and its forward pass around any attention.

    Attention and feed-forward read the same input side by side (Wang & Komatsuzaki 2021, GPT-J), so that a layer is
    three products and one norm: a small layer's time is the number of its operators. Beside a layer that has them one
    after the other it guesses as well.
    """

    def __init__(self, weights: Weights, about: LayerAttention, hidden: int, inner: int, eps: float) -> None:
        self.about, self._eps = about, eps
        queries, keys = about.heads * about.head_dim, about.kv_heads * about.head_dim
        take, attention, mlp = weights.take, "layer.self_attn.", "layer.mlp."
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
        """The next hidden states, from those at some positions and the embeddings of the tokens after them, ``[tokens,
        hidden]`` each."""
        about, normal = self.about, F.layer_norm(features, features.shape[1:], self._norm, None, self._eps)
        hidden = self._fuse(torch.cat((normal, embedded), dim=1))
        inputs = self._input(hidden)
        qkv = inputs[:, : self._heads].view(len(inputs), -1, about.head_dim)
        qk = rotary(qkv[:, : about.heads + about.kv_heads], *angles)
        mixed = attend(qk[:, : about.heads], qk[:, about.heads :], qkv[:, about.heads + about.kv_heads :])
        return self._output(torch.cat((mixed, silu_mul(inputs[:, self._heads :])), dim=1)).add_(hidden)


class EagleDrafter:
    """A ``Drafter`` with one layer of its own in the target's pages."""

    kind = "eagle"
    layers = 1

    def __init__(self, layer: _Layer, model: Model, *, theta: float) -> None:
        """``theta``: base of the rotary embedding."""
        self._layer, self._model, self._theta = layer, model, theta

    def reset(self, cache: KVCache) -> None:
        """See ``Drafter``."""
        self._cache = cache
        self._attention = TorchAttention([self._layer.about], cache.data[-1:])
        positions = cache.pages.shape[1] * cache.page_size
        self._angles = rotary_tables(frequencies(self._layer.about.head_dim, self._theta), positions)
        self._predicted = LastStates(cache, self._model.config.hidden)

    def advance(self, steps: Sequence[Advance], hidden: Tensor) -> None:
        """See ``Drafter``. Every computed token's successor is known: it is the prompt's, or was just drawn."""
        if not steps:
            return
        # Rows of similar shape lie together, as in the target's own step.
        steps = sorted(steps, key=lambda step: (len(step.rows), -step.first))
        rows = [row for step in steps for row in step.rows]
        counts = [len(step.rows) for step in steps]
        tokens = [token for one, first, some in steps for token in one.tokens[first + 1 : first + 1 + len(some)]]
        layout, positions = _layout(steps, self._cache, self._layer.about)
        last = np.cumsum(counts) - 1
        if layout.single:
            rows, tokens = rows * 2, tokens * 2
        self._attention.prepare(layout)
        predicted = self._layer(
            hidden[rows],
            self._model.embed(torch.tensor(tokens)),
            self._at(positions),
            lambda q, k, v: self._attention(0, q, k, v),
        )
        self._predicted.put(steps, predicted[last.tolist()])

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """See ``Drafter``."""
        found, predicted = self._predicted.of(wishes)
        drafts = [EMPTY] * len(wishes)
        size = 2 * self._layer.about.kv_heads * self._layer.about.head_dim
        # Branches of similar length draft together, as many as there is memory for.
        order = sorted(range(len(found)), key=lambda index: len(wishes[found[index]].sequence.tokens))
        while order:
            longest = len(wishes[found[order[-1]]].sequence.tokens)
            some = order[-max(1, _GATHERED_FLOATS // (longest * size)) :]
            del order[-len(some) :]
            asked = [wishes[found[index]] for index in some]
            for index, draft in zip(some, self._draft(asked, predicted[some]), strict=True):
                drafts[found[index]] = draft
        return drafts

    def forget(self, sequence: GenerateSequence) -> None:
        """See ``Drafter``. What is known of a branch goes with its row of the cache."""

    def _draft(self, wishes: Sequence[Wish], predicted: Tensor) -> list[Draft]:
        entries = _Entries(wishes, self._cache, self._layer.about)

        def follow(level: Level) -> Tensor:
            nonlocal predicted
            positions = entries.append(level)
            embedded = self._model.embed(torch.from_numpy(level.tokens))
            predicted = self._layer(predicted[level.parents], embedded, self._at(positions), entries.attend)
            return self._model.read(predicted)

        return grow(wishes, self._model.read(predicted), follow)

    def _at(self, positions: Ints) -> tuple[Tensor, Tensor]:
        cos, sin = self._angles
        where = torch.from_numpy(positions)
        return cos[where], sin[where]


class _Entries:
    """What some branches' guesses attend to: a copy of the branches' own entries, and behind them those of guesses.

    A level's rows are the queries of their branches. Branches with fewer of them than others are padded.
    """

    def __init__(self, wishes: Sequence[Wish], cache: KVCache, about: LayerAttention) -> None:
        self._about = about
        self._contexts = np.array([len(wish.sequence.tokens) - 1 for wish in wishes])
        self._end = int(self._contexts.max())
        self._level = 0
        self._sees = np.arange(self._end) < self._contexts[:, None]
        """Which entries each row of the latest level sees, those of the branches first."""
        depth = max(wish.depth for wish in wishes)
        wide = max(1 if wish.nodes == wish.depth else wish.nodes for wish in wishes)
        shape = (2, about.kv_heads, len(wishes), self._end + (depth - 1) * wide, about.head_dim)
        self._kv = torch.empty(shape)
        rows = [wish.sequence.pages.row for wish in wishes]
        pages = torch.from_numpy(cache.pages[rows, : -(-self._end // cache.page_size)].reshape(-1))
        own = cache.data[-1].index_select(2, pages).view(2, about.kv_heads, len(wishes), -1, about.head_dim)
        self._kv[:, :, :, : self._end] = own[:, :, :, : self._end]

    def append(self, level: Level) -> Ints:
        """Makes room for the entries of a level's guesses; returns their positions."""
        branches, rows = level.branches, np.arange(len(level.branches))
        place = rows - np.searchsorted(branches, branches)
        self._wide = int(place.max()) + 1
        self._places = branches * self._wide + place
        self._padded = len(branches) < len(self._contexts) * self._wide
        own = np.zeros((len(branches), self._wide), np.bool_)
        own[rows, place] = True
        self._sees = np.concatenate((self._sees[level.parents], own), axis=1)
        self._end, self._level = self._end + self._wide, self._level + 1
        positions: Ints = self._contexts[branches] + self._level - 1
        return positions

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the level's rows: ``q`` ``[rows, heads, head_dim]``, ``k`` and ``v`` ``[rows, kv_heads,
        head_dim]``."""
        about, count, wide = self._about, len(self._contexts), self._wide
        new = self._kv[:, :, :, self._end - wide : self._end]
        new[0] = self._spread(k).permute(2, 0, 1, 3)
        new[1] = self._spread(v).permute(2, 0, 1, 3)
        own = self._spread(q).view(count, wide, about.kv_heads, -1, about.head_dim).permute(2, 0, 3, 1, 4)
        keys, values = self._kv[:, :, :, : self._end]
        mask = None if self._sees.all() else self._mask()
        mixed = F.scaled_dot_product_attention(own.flatten(2, 3), keys, values, mask, scale=about.scale)
        mixed = mixed.view(about.kv_heads, count, -1, wide, about.head_dim).permute(1, 3, 0, 2, 4)
        mixed = mixed.reshape(count * wide, -1)
        return mixed[self._places] if self._padded else mixed

    def _spread(self, x: Tensor) -> Tensor:
        """``[rows, n, head_dim]`` as ``[branches, wide, n, head_dim]``, zeros where a branch has fewer rows."""
        shape = (len(self._contexts), self._wide, *x.shape[1:])
        if not self._padded:
            return x.reshape(shape)
        spread = x.new_zeros(shape)
        spread.flatten(0, 1)[self._places] = x
        return spread

    def _mask(self) -> Tensor:
        """``[1, branches, heads_per_kv * wide, entries]``, as queries and keys lie in ``attend``."""
        mask = np.zeros((len(self._contexts) * self._wide, self._end), np.bool_)
        mask[:, 0] = True  # a padded query sees something too
        mask[self._places] = self._sees
        heads = self._about.heads // self._about.kv_heads
        each = torch.from_numpy(mask).view(len(self._contexts), 1, self._wide, self._end)
        return each.expand(-1, heads, -1, -1).flatten(1, 2)[None]


def _layout(steps: Sequence[Advance], cache: KVCache, about: LayerAttention) -> tuple[Rows, Ints]:
    """The rows of the steps' entries for the attention, and the entries' positions."""
    queries = np.array([len(step.rows) for step in steps])
    contexts = np.array([step.first for step in steps]) + queries
    rows = np.array([step.sequence.pages.row for step in steps])
    ends = np.cumsum(queries)
    row = np.repeat(np.arange(len(steps)), queries)
    positions = np.arange(ends[-1]) + (contexts - ends)[row]
    page, offset = np.divmod(positions, cache.page_size)
    slots = cache.pages[rows[row], page] * cache.page_size + offset
    if len(positions) == 1:
        # See ``Rows.single``.
        positions, slots = positions.repeat(2), slots.repeat(2)
    layout = Rows(
        pages=cache.pages[rows, : -(-int(contexts.max()) // cache.page_size)],
        slots=slots,
        queries=queries,
        contexts=contexts,
        page_size=cache.page_size,
        pool_pages=cache.pool.size,
        kv_heads=about.kv_heads,
        heads_per_kv=about.heads // about.kv_heads,
        cost=CostModel(2 * about.kv_heads * about.head_dim * cache.data.element_size()),
    )
    return layout, positions
