"""A smaller model of the same vocabulary guesses, over paged keys and values of its own.

Its cache is like the target's: branches share what they have in common, and later requests find it. A branch is *in
step* when all its tokens but those of the last step are computed here. One that is not (its prefix was in the target's
cache, or its pages were given up) catches up first, in chunks, and siblings wait for the first one to compute what they
share. Guessed tokens lie behind a branch's own and are overwritten when they were wrong; only tokens of branches are
ever published.

A tree is the chain of the likeliest guesses with runners-up beside it. The laws that the chain was drawn from name
them, so they cost no pass of the draft model. To expand them too was simulated on the bundled models: it brings at most
4 % more tokens per step with two guesses beyond the chain and at most 8 % with four, and takes passes over all paths.

A small model's levels are computed in one call (``chain``), unless penalties must count the guesses before each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache.paged_kv import KVCache, kv_bytes_per_token
from engine.cache.radix_tree import Node
from engine.device import to_device
from engine.models.interface import Model
from engine.runner.batch import ScheduledSequence, build_batch
from engine.runner.forward import create_forward
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence, Sequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters.fused_chain import DUE, MOST, ChainStart, FusedChains, supports_fused_chains
from engine.speculation.drafters.proposal import DraftSampler

POOL_BYTES = 1 << 28
"""The pool holds as many tokens as the target's, but no more than fit into 256 MiB."""
CATCH_UP = 512
"""Most tokens that branches which are not in step compute in one step, all together."""

_Page = tuple[Node | str | None, tuple[int, ...]]
"""A page that is being computed: the cached page (or the namespace) that it comes after, and its tokens."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Row(Sequence):
    """A branch as the draft model sees it: its tokens, and behind them what was guessed last."""

    known: int
    """How many are the branch's."""

    def follow(self, tokens: list[int]) -> None:
        """The branch has these tokens now. Guesses that were right stay computed."""
        known, new = self.known, tokens[self.known :]
        right = known
        for guessed, token in zip(self.tokens[known:], new, strict=False):
            if guessed != token:
                break
            right += 1
        # The last token is always computed again: it gives the first guess.
        self.num_computed = min(self.num_computed, right, len(tokens) - 1)
        self.tokens[known:] = new
        self.known = len(tokens)


class _Ready(NamedTuple):
    """A branch that is in step as soon as the work is done."""

    row: _Row
    wish: DraftRequest
    depth: int
    """Most tokens after each other."""
    width: int
    """Most guesses at one token: 1 where a chain is wanted."""


@dataclass(slots=True)
class _Growth:
    """One branch's draft while it grows."""

    ready: _Ready
    place: int
    """Among the branches that are."""
    tokens: list[int] = field(default_factory=list)
    """The chain."""
    chances: list[float] = field(default_factory=list)
    beside: list[tuple[float, int, int, float]] = field(default_factory=list)
    """Runners-up: the chance that the chain before one and itself are right, how long that chain is, the token, and its
    chance."""
    chance: float = 1.0
    """That the chain is right."""

    def add(self, tokens: list[int], chances: list[float]) -> bool:
        """Takes the best guess as the chain's next token; answers whether the chain goes on from there."""
        # A chance is 0 for what the branch cannot draw, and none where the logits are not finite.
        guesses = [(token, chance) for token, chance in zip(tokens, chances, strict=True) if chance > 0]
        guesses = guesses[: self.ready.width]
        if not guesses:
            return False
        self.beside += [(self.chance * chance, len(self.tokens), token, chance) for token, chance in guesses[1:]]
        token, chance = guesses[0]
        self.tokens.append(token)
        self.chances.append(chance)
        self.chance *= chance
        return len(self.tokens) < self.ready.depth and token not in self.ready.wish.sequence.terminal_tokens

    @property
    def draft(self) -> Draft:
        """The chain, and as many runners-up as may be."""
        if not self.beside:
            return Draft.chain(self.tokens, self.chances)
        best = sorted(self.beside, key=lambda one: -one[0])[: self.ready.wish.nodes - len(self.tokens)]
        return Draft(
            (*self.tokens, *(token for _, _, token, _ in best)),
            (*range(-1, len(self.tokens) - 1), *(before - 1 for _, before, _, _ in best)),
            (*self.chances, *(chance for _, _, _, chance in best)),
        )


class DraftModel:
    """A ``Drafter``."""

    kind = "draft_model"
    layers = 0
    hidden_state_needs = HiddenStateNeeds.NONE

    def __init__(self, model: Model, *, context: int, pool_bytes: int = POOL_BYTES, catch_up: int = CATCH_UP) -> None:
        """``context``: most tokens of a sequence that ``model`` was loaded for."""
        self._model = model
        self._context = context
        self._pool_bytes = pool_bytes
        self._catch_up = catch_up
        self._rows: dict[GenerateSequence, _Row] = {}
        """Every branch that was asked for, the one asked for last at the end."""
        self._guesses = DraftSampler(())

    def reset(self, cache: KVCache) -> None:
        """See ``Drafter``."""
        about, device_config = self._model.config, self._model.device_config
        dtype = device_config.dtype if cache.scales is None else cache.data.dtype
        page_bytes = about.num_layers * kv_bytes_per_token(about.attention[0], dtype) * cache.page_size
        pages = max(1, min(cache.pool.size, self._pool_bytes // page_bytes))
        self._limit = min(self._context, pages * cache.page_size)
        self.cache = KVCache(
            layers=about.num_layers,
            kv_heads=about.kv_heads,
            head_dim=about.head_dim,
            pages=pages,
            page_size=cache.page_size,
            rows=len(cache.page_table),
            device_config=device_config,
            dtype=dtype,
            context=self._limit,
        )
        self._compute = create_forward(self._model, self.cache)
        model = self._model
        self._chains = FusedChains(model, self.cache, self._limit) if supports_fused_chains(model, self.cache) else None
        """Where all levels are computed at once."""
        self._rows.clear()

    def propose(self, wishes: Items[DraftRequest]) -> list[Draft]:
        """See ``Drafter``. No guesses for a branch that is catching up, that has outgrown the draft model's context or
        for which there is no memory."""
        asked = {self._row(wish.sequence): wish for wish in wishes}
        work, ready = self._schedule(asked)
        drafts: list[Draft] = []
        if ready:
            guesses = self._guesses_for([wish.sequence for _, wish, _, _ in ready])
            depth = max([depth for _, _, depth, _ in ready])
            fits = len(ready) <= MOST and max([row.known for row, _, _, _ in ready]) + depth - 1 <= self._limit
            if self._chains is not None and fits and not guesses.changed:
                drafts = self._chain(self._chains, work, ready, guesses, depth)
            else:
                drafts = self._grow(work, ready, guesses)
        elif work:
            self._forward(work, read=())
        self._publish(asked)
        found = {one.row: draft for one, draft in zip(ready, drafts, strict=True)}
        return [found.get(row, EMPTY_DRAFT) for row in asked]

    def observe_step(self, steps: Items[StepResult], hidden: Tensor) -> None:
        """See ``Drafter``. What was drawn is seen when the branch is asked for next."""

    def release(self, sequence: GenerateSequence) -> None:
        """See ``Drafter``. What was computed of the branch stays cached."""
        row = self._rows.pop(sequence, None)
        if row is not None:
            row.follow(sequence.tokens)
            self._close(row)

    def clear_cache(self) -> None:
        """See ``Drafter``."""
        self.cache.clear()

    def _guesses_for(self, sequences: list[GenerateSequence]) -> DraftSampler:
        """Mostly for the branches that it was for before."""
        if self._guesses.sequences != sequences or self._guesses.changed:
            self._guesses = DraftSampler(sequences)
        return self._guesses

    def _row(self, sequence: GenerateSequence) -> _Row:
        row = self._rows.pop(sequence, None)
        if row is None:
            tokens = list(sequence.tokens)
            row = _Row(job=sequence.job, index=0, tokens=tokens, num_prefix_tokens=len(tokens), known=len(tokens))
        else:
            row.follow(sequence.tokens)
        self._rows[sequence] = row
        return row

    # What is computed first: the tokens that branches have and the draft model does not.

    def _schedule(self, asked: Mapping[_Row, DraftRequest]) -> tuple[list[ScheduledSequence], list[_Ready]]:
        """The tokens to compute, with pages for them and for the guesses, and the branches that are in step then."""
        size, limit, left = self.cache.page_size, self._limit, self._catch_up
        deepest = max([wish.depth for wish in asked.values()], default=0)
        work: list[ScheduledSequence] = []
        ready: list[_Ready] = []
        underway: set[_Page] = set()
        # First those that run already: others may wait for what they are about to compute.
        for row in sorted(asked, key=lambda row: row.table is None):
            wish, known, table = asked[row], row.known, row.table
            depth = min(wish.depth, limit - known + 1)
            if depth < 1:
                self._close(row)
                continue
            # Chains that are computed together are as deep as the deepest.
            room = min(known + deepest - 1, limit)
            enough = table is not None and room <= len(table.pages) * size
            if not enough and not self._make_room(row, room, asked, underway):
                continue
            due = count = known - row.num_computed
            if due > size:
                underway.add((_end(row), _page(row, row.pages.num_shared_pages, size)))
                count = min(due, left)
                left -= count
            if count:
                work.append(ScheduledSequence(row, count))
            if count == due:
                ready.append(_Ready(row, wish, depth, 1 + wish.nodes - wish.depth))
        return work, ready

    def _make_room(self, row: _Row, tokens: int, asked: Collection[_Row], underway: Collection[_Page]) -> bool:
        """Gives a row pages for so many tokens, at the cost of branches that are not asked for; without them it gives
        its own up, so that others can go on."""
        if row.table is None and not self._open(row, tokens, asked, underway):
            return False
        while not self.cache.reserve(row.pages, tokens):
            if not self._close_another(asked):
                self._close(row)
                return False
        return True

    def _open(self, row: _Row, tokens: int, asked: Collection[_Row], underway: Collection[_Page]) -> bool:
        """Starts a row on what is cached of it, unless it had better wait: for memory, or for another row that computes
        the very page that it needs next."""
        cache, namespace = self.cache, row.job.namespace
        while True:
            match = row.match = cache.match_prefix(row.tokens, row.known - 1, namespace, row.match)
            end = match.nodes[-1] if match.nodes else namespace
            if (end, _page(row, len(match.nodes), cache.page_size)) in underway:
                return False
            if cache.num_tables < len(cache.page_table) and cache.has_room(match, tokens, 0):
                break
            if not self._close_another(asked):
                return False
        row.table, row.match = cache.open_table(match, namespace), None
        row.num_computed = row.table.num_cached_tokens
        return True

    def _close_another(self, asked: Collection[_Row]) -> bool:
        """Takes the pages of the branch that was not asked for for the longest time."""
        for row in self._rows.values():
            if row in asked:
                break
            if row.table is not None:
                self._close(row)
                return True
        return False

    def _close(self, row: _Row) -> None:
        if row.table is not None:
            self.cache.publish(row.table, row.tokens, min(row.num_computed, row.known), include_partial=True)
            self.cache.close_table(row.table)
            row.table, row.num_computed = None, 0

    def _publish(self, rows: Iterable[_Row]) -> None:
        """What fills a page becomes shareable, but for guesses."""
        size = self.cache.page_size
        for row in rows:
            own, table = min(row.num_computed, row.known), row.table
            if table is not None and own // size > table.num_shared_pages:
                self.cache.publish(table, row.tokens, own, include_partial=False)

    # Then the guesses, level by level.

    def _grow(self, work: Items[ScheduledSequence], ready: Items[_Ready], guesses: DraftSampler) -> list[Draft]:
        """Computes the tokens and draws guesses level by level until every chain has ended."""
        hidden, last = self._forward(work)
        guesses.move()
        growths = growing = [_Growth(one, place) for place, one in enumerate(ready)]
        width = max(one.width for one in ready)
        ahead = 0
        while True:
            rows = torch.tensor([last[one.ready.row] for one in growing])
            logits = self._model.compute_logits(hidden[to_device(rows, hidden.device)])
            branches = np.array([one.place for one in growing])
            paths = [one.tokens for one in growing]
            best = guesses.best(logits, branches, np.full(len(growing), ahead), width, paths)
            added = zip(growing, *(array.tolist() for array in best), strict=True)
            growing = [one for one, tokens, chances in added if one.add(tokens, chances)]
            if not growing:
                return [one.draft for one in growths]
            for one in growing:
                one.ready.row.tokens.append(one.tokens[-1])
            hidden, last = self._forward([ScheduledSequence(one.ready.row, 1) for one in growing])
            ahead += 1

    def _chain(
        self,
        chains: FusedChains,
        work: Items[ScheduledSequence],
        ready: Items[_Ready],
        guesses: DraftSampler,
        depth: int,
    ) -> list[Draft]:
        """The same with all levels at once."""
        if len(work) > len(ready) or max([count for _, count, _ in work]) > DUE:
            in_step = {one.row for one in ready}
            late = [
                ScheduledSequence(row, count - (row in in_step))
                for row, count, _ in work
                if count > DUE or row not in in_step
            ]
            self._forward(late, read=())
        # As many for each, be one of them computed already: the fewer shapes there are, the fewer are recorded.
        starts = [ChainStart(row.pages.row, row.tokens[-DUE:], row.known) for row, _, _, _ in ready]
        width = max([width for _, _, _, width in ready])
        tokens, chances = chains(starts, guesses, depth, width)
        best, odds = tokens[..., 0].T.tolist(), chances[..., 0].T.tolist()
        drafts: list[Draft] = []
        for (row, _, most, _), guessed, right in zip(ready, best, odds, strict=True):
            row.tokens += guessed[:-1]
            row.num_computed = len(row.tokens)
            drafts.append(_possible(guessed[:most], right[:most]))
        if width == 1:
            return drafts
        trees = [_Growth(one, place) for place, one in enumerate(ready)]
        for tree, *found in zip(trees, tokens.swapaxes(0, 1).tolist(), chances.swapaxes(0, 1).tolist(), strict=True):
            for level in zip(*found, strict=True):
                if not tree.add(*level):
                    break
        return [tree.draft for tree in trees]

    def _forward(
        self, work: Items[ScheduledSequence], read: Items[int] | None = None
    ) -> tuple[Tensor, dict[Sequence, int]]:
        """Computes tokens; answers the final hidden states, valid until the next call, and, for each row, which of them
        is its last token's. ``read``: see ``Forward``."""
        batch, layout, ordered = build_batch(work, self.cache, self._model.config.attention[0])
        hidden = self._compute(batch, layout, read)
        last: dict[Sequence, int] = {}
        end = 0
        for row, count, _ in ordered:
            row.num_computed += count
            end += count
            last[row] = end - 1
        return hidden, last


def _possible(tokens: list[int], chances: list[float]) -> Draft:
    """The chain of the guesses before the first that cannot be drawn, or that is none."""
    count = 0
    for chance in chances:
        if not chance > 0:
            break
        count += 1
    return Draft.chain(tokens[:count], chances[:count])


def _end(row: _Row) -> Node | str | None:
    """What the next page of a row comes after in the tree."""
    return row.pages.last_node or row.pages.namespace


def _page(row: _Row, index: int, size: int) -> tuple[int, ...]:
    return tuple(row.tokens[index * size : (index + 1) * size])
