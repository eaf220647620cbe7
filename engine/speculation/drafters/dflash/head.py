"""DFlash drafter: a small model that predicts a block of tokens at once, from hidden states of the target.

Chen et al. 2026, https://arxiv.org/abs/2602.06036; the format: ``config``.

Of each computed position of the text ``fc`` fuses the hidden states of some of the target's layers to a feature, from
which each of the head's layers makes a key and a value. To draft, the layers read the last token and a mask token for
each position to predict; each position sees the keys of the text and those of the block, in both directions unless a
layer is causal. The target's own output projection makes logits of what the masks have become.

Keys and values of the text lie in pages behind the target's. They depend on the position alone and are written when the
target has computed it, so that they are shared, forked and evicted with their prefix. Those of a block are never
written. Positions that were computed without the drafter, those of scores, have zeros, which costs acceptance and never
correctness: every draft token is verified.

DFlash 2 has two causal convolutions a layer, whose filters depend on the position, and a selector, with which a draft
token depends on the one before it: it adds to the logit of each of a position's likeliest tokens the product of a
vector of that token, one of the token before and one of the position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.paged_tensors import gather_pages, write_kv
from engine.attention.plan import kv_slots
from engine.cache.paged_kv import KVCache
from engine.device import to_device
from engine.models.decoder import Decoder
from engine.models.interface import Model
from engine.protocol.types import EngineError
from engine.sampling.sampler import Ints
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters.dflash.config import KIND, DFlashConfig, read_dflash_config
from engine.speculation.drafters.dflash.layers import Angles, DFlashHead
from engine.speculation.drafters.tree_draft import Level, combine_positions, grow_trees

_GATHERED_FLOATS = 1 << 24
"""Maximum number of copied keys and values (float32, 64 MiB) at once; one branch's may be more."""


def load_dflash(folder: Path, model: Model) -> DFlashDrafter:
    """Load the head in ``folder`` (``config.json``, ``model.safetensors``) for a target.

    Raises ``EngineError`` that names what is missing, damaged, left over, or does not fit the target.
    """
    config = read_dflash_config(folder, model.config)
    if not isinstance(model, Decoder):
        raise EngineError(f"{folder}: DFlash heads are not supported for {model.config.architecture}")
    return DFlashDrafter(config, DFlashHead(folder, config, model), model)


class DFlashDrafter:
    """A ``Drafter`` with layers of its own in the target's pages."""

    kind = KIND
    hidden_state_needs = HiddenStateNeeds.ALL

    def __init__(self, config: DFlashConfig, head: DFlashHead, model: Decoder) -> None:
        self.key_shapes, self.observed_layers = config.key_shapes, config.target_layers
        self._config, self._head, self._model = config, head, model
        self._device = model.device_config.device

    def reset(self, cache: KVCache) -> None:
        self._cache = cache
        count = len(self.key_shapes)
        pool = next(pool for pool in cache.pools if pool.shape == self.key_shapes[0])
        scales = [None] * count if pool.scales is None else list(pool.scales[-count:])
        self._pages = list(zip(pool.data[-count:], scales, strict=True))
        """Keys and values of each layer in all pages, and their scales."""
        positions = cache.page_table.shape[1] * cache.page_size + self._config.block_size
        cos, sin = self._config.rope.tables(positions)
        self._angles = cos.to(self._device), sin.to(self._device)

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        """Write keys and values of the positions that the step computed."""
        rows = [row for step in steps for row in step.rows]
        if not rows:
            return
        cache, shape = self._cache, self.key_shapes[0]
        positions = np.concatenate([step.first_position + np.arange(len(step.rows)) for step in steps])
        table_rows = np.array([step.sequence.pages.row for step in steps]).repeat([len(step.rows) for step in steps])
        page, offset = np.divmod(positions, cache.page_size)
        slots = cache.page_table[table_rows, page] * cache.page_size + offset
        targets = self._move(kv_slots(slots, cache.pool.size * cache.page_size, 2 * shape.kv_heads))
        features = self._head.fuse(hidden[self._move(np.array(rows))] * self._model.config.hidden_scale)
        angles = self._take_angles(positions)
        for layer, (data, scales) in zip(self._head.layers, self._pages, strict=True):
            write_kv(data, scales, targets, layer.project_features(features, angles))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts, shape = [EMPTY_DRAFT] * len(requests), self.key_shapes[0]
        # Branches of similar length draft together, as many as there is memory for.
        rest = sorted(range(len(requests)), key=lambda index: len(requests[index].sequence.tokens))
        while rest:
            size = len(requests[rest[-1]].sequence.tokens) * 2 * shape.kv_heads * shape.head_dim
            some = rest[-max(1, _GATHERED_FLOATS // size) :]
            del rest[-len(some) :]
            for index, draft in zip(some, self._draft([requests[index] for index in some]), strict=True):
                drafts[index] = draft
        return drafts

    def release(self, sequence: GenerateSequence) -> None:
        """Do nothing: all entries are in the target's pages."""

    def warm_ups(self) -> list[Callable[[], None]]:
        """Return nothing: no draft is captured."""
        return []

    def clear_cache(self) -> None:
        """Do nothing: all entries are in the target's pages."""

    def _draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        depth = min(self._config.block_size - 1, max(request.depth for request in requests))
        sequences = [request.sequence for request in requests]
        tokens = np.full((len(requests), 1 + depth), self._config.mask_token)
        tokens[:, 0] = [sequence.tokens[-1] for sequence in sequences]
        starts = np.array([len(sequence.tokens) - 1 for sequence in sequences])
        hidden = self._compute(tokens, np.array([sequence.pages.row for sequence in sequences]), starts)
        hidden = hidden.view(*tokens.shape, -1)[:, 1:].flatten(0, 1)
        logits = self._read_logits(hidden)
        limited = [_limit(request, depth) for request in requests]
        if self._head.selector is None:
            return combine_positions(limited, logits, depth)
        weigh, ahead = self._head.selector.open(hidden, logits), 0

        def follow(level: Level) -> Tensor:
            nonlocal ahead
            ahead += 1
            return weigh(self._move(level.branches * depth + ahead), self._move(level.tokens))

        first = weigh(self._move(np.arange(len(requests)) * depth), self._move(tokens[:, 0]))
        return grow_trees(limited, first, follow)

    def _compute(self, tokens: Ints, rows: Ints, starts: Ints) -> Tensor:
        """Return the final hidden states of blocks of tokens ``[branches, size]``, block by block.

        ``rows``: each branch's row of the page table; ``starts``: the position of its block's first token.
        """
        size = tokens.shape[1]
        angles = self._take_angles((starts[:, None] + np.arange(size)).reshape(-1))
        hidden = self._model.embed(self._move(tokens.reshape(-1))) * self._config.embedding_scale
        for index, layer in enumerate(self._head.layers):
            attend = partial(self._attend, index, rows, starts)
            hidden = layer(hidden, angles, size, attend)
        return self._head.normalize(hidden)

    def _attend(self, index: int, rows: Ints, starts: Ints, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return a layer's attention from blocks to the text before them and to each other.

        ``q``, ``k``, ``v``: ``[branches * size, heads, head_dim]``, rotated.
        """
        config, count = self._config.attention[index], len(rows)
        size, kv_heads, dim = len(q) // count, config.kv_heads, config.head_dim
        first, known = self._gather(index, rows, starts)
        block = torch.stack((k, v)).view(2, count, size, kv_heads, dim).permute(0, 3, 1, 2, 4)
        keys, values = torch.cat((known.to(block.dtype), block), dim=3)
        queries = q.view(count, size, kv_heads, -1, dim).permute(2, 0, 3, 1, 4)
        visible = _find_visible(
            starts, first, known.shape[3], size, config.window, is_causal=self._config.causal[index]
        )
        mask = self._move(visible)[:, None].expand(-1, queries.shape[2], -1, -1).flatten(1, 2)[None]
        mixed = F.scaled_dot_product_attention(queries.flatten(2, 3), keys, values, mask, scale=config.scale)
        return mixed.view(queries.shape).permute(1, 3, 0, 2, 4).reshape(len(q), -1)

    def _gather(self, index: int, rows: Ints, starts: Ints) -> tuple[Ints, Tensor]:
        """Return copies of a layer's keys and values of the texts that blocks may see.

        Returns the position of the first one of each branch ``[branches]``, and ``[2, kv_heads, branches, positions,
        head_dim]``; where a text ends before, other numbers follow.
        """
        config, cache = self._config.attention[index], self._cache
        data, scales = self._pages[index]
        before = starts if config.window is None else np.minimum(starts, config.window - 1)
        first_page = (starts - before) // cache.page_size
        num_pages = int((-(-starts // cache.page_size) - first_page).max())
        columns = np.minimum(first_page[:, None] + np.arange(num_pages), cache.page_table.shape[1] - 1)
        pages = cache.page_table[rows[:, None], columns].reshape(-1)
        heads = cache.pool.size * np.arange(2 * config.kv_heads)[:, None]
        chosen = self._move((heads + pages).reshape(-1))
        dtype = data.dtype if scales is None else torch.float32
        known = torch.empty(len(chosen), cache.page_size * config.head_dim, dtype=dtype, device=self._device)
        if len(chosen):
            gather_pages(data, scales, chosen, known)
        shape = 2, config.kv_heads, len(rows), num_pages * cache.page_size, config.head_dim
        return first_page * cache.page_size, known.view(shape)

    def _read_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[rows, vocab]`` of normalised hidden states, which the target's projection reads."""
        logits, cap = self._model.read_logits(hidden), self._config.logit_softcap
        if self._config.logit_scale != 1:
            logits = logits * self._config.logit_scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _take_angles(self, positions: Ints) -> Angles:
        where = self._move(positions)
        return self._angles[0][where], self._angles[1][where]

    def _move(self, numbers: npt.NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(numbers), self._device)


def _limit(request: DraftRequest, depth: int) -> DraftRequest:
    """Return the request for a draft that is not deeper than ``depth``."""
    if request.depth <= depth:
        return request
    is_chain = request.nodes == request.depth
    return request._replace(depth=depth, nodes=depth if is_chain else max(request.nodes, depth + 1))


def _find_visible(
    starts: Ints, first: Ints, num_known: int, size: int, window: int | None, *, is_causal: bool
) -> npt.NDArray[np.bool_]:
    """Return which keys each position of a block sees, ``[branches, size, num_known + size]``.

    ``starts``, ``first``: positions of each branch's block, and of the first key that was gathered.
    """
    known = first[:, None] + np.arange(num_known)
    keys = np.concatenate((known, starts[:, None] + np.arange(size)), axis=1)
    exists = np.concatenate((known < starts[:, None], np.ones((len(starts), size), np.bool_)), axis=1)
    distance = (starts[:, None] + np.arange(size))[:, :, None] - keys[:, None]
    visible = exists[:, None].repeat(size, axis=1)
    if is_causal:
        visible = visible & (distance >= 0)
    return visible if window is None else visible & (np.abs(distance) < window)
