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
worth the fixed cost, so a branch without drafts pays little. Entries of draft tokens never go into pages: on the CPU
drafting copies a branch's entries once and appends those of its draft tokens (``draft_entries``), on a GPU they have
places of their own, and nothing is copied (``device_trees``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.cuda_triton import TritonAttention
from engine.attention.layer import HeadShape, LayerAttentionConfig
from engine.attention.select import create_cpu_attention
from engine.cache.paged_kv import KVCache
from engine.device import to_device
from engine.models.interface import Model
from engine.protocol.types import EngineError
from engine.runner.batch import lay_out
from engine.sampling.sampler import Ints
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters.device_trees import EagleTrees
from engine.speculation.drafters.draft_entries import NO_SPAN, DraftEntries, Span
from engine.speculation.drafters.draft_layer import Attend, DraftLayer
from engine.speculation.drafters.head_config import fits, product, read_head_config, readout
from engine.speculation.drafters.tree_draft import Level, grow_trees
from engine.weights.safetensors import Weights
from kernels.common.rotary import frequencies, rotary, rotary_tables
from kernels.layers.activation import silu_mul

_GATHERED_FLOATS = 1 << 24
"""Maximum number of copied keys and values (float32, 64 MiB) at once; one branch's may be more."""
_WAITING = 8
"""Maximum number of tokens of a branch without entries."""
_NUMBERS = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("layer_norm_eps", "rope_theta"),
)


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
    layer_config = LayerAttentionConfig(heads, target.kv_heads, target.head_dim, target.head_dim**-0.5)
    inner, eps = int(fields["intermediate_size"]), fields["layer_norm_eps"]
    return EagleDrafter(
        _Layer(Weights(folder), layer_config, inner=inner, eps=eps, theta=fields["rope_theta"], model=model), model
    )


class _Layer:
    """The ``DraftLayer`` of EAGLE. Features are the target's final hidden states.

    Attention and feed-forward read the same input in parallel (Wang & Komatsuzaki 2021, GPT-J), so a layer is three
    matrix products and one norm: a small layer's time is its number of operators. Sequential layers draft no better.
    """

    kind = "eagle"
    observed_layers: tuple[int, ...] = ()

    def __init__(
        self, weights: Weights, layer_config: LayerAttentionConfig, inner: int, eps: float, theta: float, model: Model
    ) -> None:
        """``theta``: base of the rotary embedding."""
        device_config, hidden = model.device_config, model.config.hidden_size
        self.layer_config, self._eps, self._theta = layer_config, eps, theta
        self.state_size = hidden
        self.embed = model.embed
        self.compute_logits = readout(model)
        queries, keys = layer_config.heads * layer_config.head_dim, layer_config.kv_heads * layer_config.head_dim
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

    def create_rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        return rotary_tables(frequencies(self.layer_config.head_dim, self._theta), positions)

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def __call__(self, features: Tensor, embedded: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        layer_config, normal = (
            self.layer_config,
            F.layer_norm(features, features.shape[1:], self._norm, None, self._eps),
        )
        hidden = self._fuse(torch.cat((normal, embedded), dim=1))
        inputs = self._input(hidden)
        qkv = inputs[:, : self._heads].view(len(inputs), -1, layer_config.head_dim)
        qk = rotary(qkv[:, : layer_config.heads + layer_config.kv_heads].float(), *angles).to(qkv.dtype)
        mixed = attend(
            qk[:, : layer_config.heads],
            qk[:, layer_config.heads :],
            qkv[:, layer_config.heads + layer_config.kv_heads :],
        )
        return self._output(torch.cat((mixed, silu_mul(inputs[:, self._heads :])), dim=1)).add_(hidden)


class EagleDrafter:
    """A ``Drafter`` with one layer of its own in the target's pages."""

    hidden_state_needs = HiddenStateNeeds.ALL

    def __init__(self, layer: DraftLayer, model: Model) -> None:
        self.key_shapes: tuple[HeadShape, ...] = (model.config.first_attention.shape,)
        self.kind, self.observed_layers = layer.kind, layer.observed_layers
        self._layer, self._device_config = layer, model.device_config
        self._hidden_scale = model.config.hidden_scale

    def reset(self, cache: KVCache) -> None:
        for name in ("_waiting", "_trees"):  # freed before others are allocated
            vars(self).pop(name, None)
        self._cache = cache
        layer_config, device_config = self._layer.layer_config, self._device_config
        attention = TritonAttention if device_config.uses_gpu_kernels else create_cpu_attention
        self._attention = attention([layer_config], cache.data[-1:], cache.scales_of(slice(-1, None)))
        positions = cache.page_table.shape[1] * cache.page_size
        cos, sin = self._layer.create_rotary_tables(positions)
        self._angles = cos.to(device_config.device), sin.to(device_config.device)
        rows = len(cache.page_table)
        shape = rows, _WAITING, self._layer.state_size
        self._waiting = torch.zeros(shape, dtype=device_config.dtype, device=device_config.device)
        """States without entries, for each row of the page table."""
        self._spans = [NO_SPAN] * rows
        is_gpu = device_config.uses_gpu_kernels
        self._trees = EagleTrees(self._layer, cache, self._waiting, self._angles) if is_gpu else None
        """Drafts on a GPU."""

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        """Store hidden states; the token after each is known from the prompt or was just sampled."""
        if self._hidden_scale != 1:
            hidden = hidden * self._hidden_scale
        due: list[tuple[StepResult, Span]] = []
        rows: list[int] = []
        places: list[int] = []
        kept: list[int] = []
        for step in steps:
            table, new = step.sequence.pages, len(step.rows)
            span = self._spans[table.row]
            if span.table is not table or span.first + span.length != step.first_position:
                span = Span(table, step.first_position, 0)
            if span.length + new > _WAITING:
                due.append((step, span))
                continue
            self._spans[table.row] = Span(table, span.first, span.length + new)
            rows += [table.row] * new
            places += range(span.length, span.length + new)
            kept += step.rows
        if rows:
            places = [row * _WAITING + place for row, place in zip(rows, places, strict=True)]
            states = hidden[_create_index(kept, hidden)]
            self._waiting.flatten(0, 1).index_copy_(0, _create_index(places, hidden), states)
        if due:
            self._compute(due, hidden)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(requests)
        config = self._layer.layer_config
        size = config.shape.num_kinds * config.kv_heads * config.head_dim
        # Branches of similar length draft together, as many as there is memory for.
        known = [index for index, request in enumerate(requests) if self._is_known(request.sequence)]
        if self._trees is not None:
            return self._draft_on_gpu(self._trees, requests, known)
        known.sort(key=lambda index: len(requests[index].sequence.tokens))
        while known:
            longest = len(requests[known[-1]].sequence.tokens)
            some = known[-max(1, _GATHERED_FLOATS // (longest * size)) :]
            del known[-len(some) :]
            for index, draft in zip(some, self._draft([requests[index] for index in some]), strict=True):
                drafts[index] = draft
        return drafts

    def _draft_on_gpu(self, trees: EagleTrees, requests: Sequence[DraftRequest], known: Sequence[int]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(requests)
        if known:
            some = [requests[index] for index in known]
            spans = [self._spans[request.sequence.pages.row] for request in some]
            for index, draft in zip(known, trees(some, spans), strict=True):
                drafts[index] = draft
            self._clear(spans)
        return drafts

    def release(self, sequence: GenerateSequence) -> None:
        """Do nothing: the branch's state is replaced with its row of the page table."""

    def warm_ups(self) -> list[Callable[[], None]]:
        return [] if self._trees is None else self._trees.warm_ups()

    def clear_cache(self) -> None:
        """Do nothing: all entries are in the target's pages."""

    def _is_known(self, sequence: GenerateSequence) -> bool:
        """Return True if the hidden states of the branch's latest tokens are stored, all but the last token's, which
        has none."""
        span = self._spans[sequence.pages.row]
        known = span.table is sequence.pages and span.first + span.length == len(sequence.tokens) - 1
        return known and span.length > 0

    def _compute(self, due: Sequence[tuple[StepResult, Span]], hidden: Tensor) -> None:
        """Compute the entries of stored and new hidden states, all but the last, which waits for a draft."""
        states = [
            torch.cat((self._waiting[span.table.row, : span.length], hidden[_create_index(step.rows[:-1], hidden)]))
            for step, span in due
        ]
        spans = [Span(span.table, span.first, len(some)) for (_, span), some in zip(due, states, strict=True)]
        rows, firsts, queries = np.array([(span.table.row, span.first, span.length) for span in spans]).T
        layout = lay_out(
            self._cache, self._layer.layer_config, table_rows=rows, queries=queries, contexts=firsts + queries, trees={}
        )
        self._attention.prepare(layout)
        device = self._waiting.device
        tokens = torch.tensor(_collect_successors([step.sequence for step, _ in due], spans))
        embedded = self._layer.embed(to_device(tokens, device))
        angles = self._get_angles(layout.token_indices)
        features = self._layer.fuse(torch.cat(states))
        self._layer(features, embedded, angles, lambda q, k, v: self._attention(0, q, k, v))
        last = hidden[_create_index([step.rows[-1] for step, _ in due], hidden)]
        self._waiting.flatten(0, 1).index_copy_(0, _create_index((rows * _WAITING).tolist(), hidden), last)
        for row, span in zip(rows.tolist(), spans, strict=True):
            self._spans[row] = Span(span.table, span.first + span.length, 1)

    def _draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        sequences = [request.sequence for request in requests]
        spans = [self._spans[one.pages.row] for one in sequences]
        entries = DraftEntries(spans, requests, self._cache, self._layer.layer_config)
        embedded = self._layer.embed(torch.tensor(_collect_successors(sequences, spans)))
        states = torch.cat([self._waiting[span.table.row, : span.length] for span in spans])
        features = self._layer.fuse(states)
        predicted = self._layer(features, embedded, self._get_angles(entries.positions), entries.attend)
        entries.publish(self._cache)
        self._clear(spans)
        predicted = predicted[entries.last]

        def follow(level: Level) -> Tensor:
            nonlocal predicted
            entries.append(level)
            embedded = self._layer.embed(torch.from_numpy(level.tokens))
            angles = self._get_angles(entries.positions)
            predicted = self._layer(predicted[level.parents], embedded, angles, entries.attend)
            return self._layer.compute_logits(predicted)

        return grow_trees(requests, self._layer.compute_logits(predicted), follow)

    def _clear(self, spans: Sequence[Span]) -> None:
        """Note that the entries of all waiting states were computed."""
        for span in spans:
            self._spans[span.table.row] = Span(span.table, span.first + span.length, 0)

    def _get_angles(self, positions: Ints) -> tuple[Tensor, Tensor]:
        cos, sin = self._angles
        where = to_device(torch.from_numpy(positions), cos.device)
        return cos[where], sin[where]


def _create_index(places: Sequence[int], like: Tensor) -> Tensor:
    """Return an index on a tensor's device, without waiting for it as an index of Python's does."""
    return to_device(torch.tensor(places, dtype=torch.int64), like.device)


def _collect_successors(sequences: Sequence[GenerateSequence], spans: Sequence[Span]) -> list[int]:
    """Return the token after each token of the spans."""
    return [
        token
        for one, (_, first, count) in zip(sequences, spans, strict=True)
        for token in one.tokens[first + 1 : first + 1 + count]
    ]
