"""Drafter: a smaller model of the same vocabulary, over paged keys and values of its own.

Its cache is like the target's: branches share common prefixes, and later requests find them. A branch is *in step* if
all its tokens but those of the last step are computed here. One that is not (its prefix was in the target's cache, or
its pages were freed) catches up first, in chunks, and siblings wait for the first one to compute what they share. Draft
tokens follow a branch's own tokens and are overwritten if they are rejected; only tokens of branches are published.

A tree is the chain of the likeliest draft tokens with runners-up beside it, which come from the same distributions as
the chain and cost no pass of the draft model. In simulations with the bundled models, expanding them too brings at most
4 % more tokens per step with two tokens beyond the chain and at most 8 % with four, and takes passes over all paths.

On the CPU a small model's levels are computed in one call (``fused_chain``), unless penalties must count the tokens
before each. On a GPU tokens stay there between levels (``device_chain``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.key_pool import kv_bytes_per_token
from engine.cache.paged_kv import KVCache
from engine.cache.radix_tree import Node
from engine.models.interface import Model
from engine.runner.batch import ScheduledSequence, build_batch
from engine.runner.forward import create_forward
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence, Sequence
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters.device_chain import DeviceChains
from engine.speculation.drafters.device_levels import MAX_DEPTH
from engine.speculation.drafters.draft_rows import DraftInProgress, DraftRow, ReadyRow, possible_chain
from engine.speculation.drafters.fused_chain import DUE, MOST, ChainStart, FusedChains, supports_fused_chains
from engine.speculation.drafters.proposal import DraftSampler

POOL_BYTES = 1 << 28
"""Maximum size of the pool, which otherwise holds as many tokens as the target's."""
CATCH_UP = 512
"""Maximum number of tokens that branches compute per step to catch up, all together."""

_Page = tuple[Node | str | None, tuple[int, ...]]
"""Key of a page in progress: the cached page (or the namespace) before it, and its tokens."""


class DraftModel:
    """A ``Drafter`` with a model of its own."""

    kind = "draft_model"
    key_shapes: tuple[HeadShape, ...] = ()
    hidden_state_needs = HiddenStateNeeds.NONE
    observed_layers: tuple[int, ...] = ()

    def __init__(self, model: Model, *, context: int, pool_bytes: int = POOL_BYTES, catch_up: int = CATCH_UP) -> None:
        """``context``: maximum number of tokens of a sequence that ``model`` was loaded for."""
        self._model = model
        self._context = context
        self._pool_bytes = pool_bytes
        self._catch_up = catch_up
        self._rows: dict[GenerateSequence, DraftRow] = {}
        """Rows of the branches, the most recently drafted one last."""
        self._sampler = DraftSampler(())

    def reset(self, cache: KVCache) -> None:
        self._free_cache()
        config, device_config = self._model.config, self._model.device_config
        dtype = device_config.dtype if cache.scales is None else cache.data.dtype
        page_bytes = sum(kv_bytes_per_token(shape, dtype) for shape in config.head_shapes) * cache.page_size
        pages = max(1, min(cache.pool.size, self._pool_bytes // page_bytes))
        self._limit = min(self._context, pages * cache.page_size)
        self.cache = KVCache(
            layers=config.head_shapes,
            pages=pages,
            page_size=cache.page_size,
            rows=len(cache.page_table),
            device_config=device_config,
            dtype=dtype,
            context=self._limit,
        )
        self._compute = create_forward(self._model, self.cache)
        model = self._model
        self._chains: FusedChains | DeviceChains | None = None
        """All levels in one call, if the model supports that."""
        if device_config.uses_gpu_kernels:
            self._chains = DeviceChains(model, self.cache)
        elif supports_fused_chains(model, self.cache):
            self._chains = FusedChains(model, self.cache, self._limit)

    def _free_cache(self) -> None:
        """Free the cache and what computes in it, which a GPU has no room to keep while others are created."""
        self._rows.clear()
        for name in ("_chains", "_compute", "cache"):  # absent before the first reset
            vars(self).pop(name, None)

    def propose(self, requests: Items[DraftRequest]) -> list[Draft]:
        """Return drafts; none for branches that catch up, exceed the model's context, or have no memory."""
        requested = {self._take_row(request.sequence): request for request in requests}
        work, ready = self._schedule(requested)
        drafts: list[Draft] = []
        if ready:
            sampler = self._get_sampler([request.sequence for _, request, _, _ in ready])
            depth, longest = max([one.depth for one in ready]), max([one.row.num_own for one in ready])
            fits = len(ready) <= MOST and longest + depth - 1 <= self._limit
            if isinstance(self._chains, DeviceChains):
                depth = min(depth, MAX_DEPTH, self._limit - longest + 1)
                drafts = self._draft_fused(self._chains, work, ready=ready, sampler=sampler, depth=depth)
            elif self._chains is not None and fits and not sampler.has_processors:
                drafts = self._draft_fused(self._chains, work, ready=ready, sampler=sampler, depth=depth)
            else:
                drafts = self._draft_by_level(work, ready, sampler)
        elif work:
            self._forward(work, read=())
        self._publish(requested)
        found = {one.row: draft for one, draft in zip(ready, drafts, strict=True)}
        return [found.get(row, EMPTY_DRAFT) for row in requested]

    def observe_step(self, steps: Items[StepResult], hidden: Tensor) -> None:
        """Do nothing: new tokens are read from the branches with the next draft."""

    def release(self, sequence: GenerateSequence) -> None:
        """Free the branch's row; its tokens stay cached."""
        row = self._rows.pop(sequence, None)
        if row is not None:
            row.follow(sequence.tokens)
            self._close(row)

    def warm_ups(self) -> list[Callable[[], None]]:
        return self._chains.warm_ups() if isinstance(self._chains, DeviceChains) else []

    def clear_cache(self) -> None:
        self.cache.clear()

    def _get_sampler(self, sequences: list[GenerateSequence]) -> DraftSampler:
        """Return the sampler of draft tokens, reused while the branches are the same."""
        if self._sampler.sequences != sequences or self._sampler.has_processors:
            self._sampler = DraftSampler(sequences)
        return self._sampler

    def _take_row(self, sequence: GenerateSequence) -> DraftRow:
        row = self._rows.pop(sequence, None)
        if row is None:
            tokens = list(sequence.tokens)
            row = DraftRow(
                request=sequence.request, index=0, tokens=tokens, num_prefix_tokens=len(tokens), num_own=len(tokens)
            )
        else:
            row.follow(sequence.tokens)
        self._rows[sequence] = row
        return row

    # Catching up: tokens of the branches that the draft model has not computed.

    def _schedule(self, requested: Mapping[DraftRow, DraftRequest]) -> tuple[list[ScheduledSequence], list[ReadyRow]]:
        """Return the tokens to compute, with pages for them and for the drafts, and the branches that are in step
        then."""
        size, limit, left = self.cache.page_size, self._limit, self._catch_up
        max_depth = max([request.depth for request in requested.values()], default=0)
        work: list[ScheduledSequence] = []
        ready: list[ReadyRow] = []
        pending_pages: set[_Page] = set()
        # Open rows first: others may wait for the pages that they compute.
        for row in sorted(requested, key=lambda row: row.table is None):
            request, num_own, table = requested[row], row.num_own, row.table
            depth = min(request.depth, limit - num_own + 1)
            if depth < 1:
                self._close(row)
                continue
            # Chains that are computed together all have the largest requested depth.
            room = min(num_own + max_depth - 1, limit)
            enough = table is not None and room <= len(table.pages) * size
            if not enough and not self._make_room(row, room, requested, pending_pages):
                continue
            due = count = num_own - row.num_computed
            if due > size:
                pending_pages.add((_get_end(row), _get_page_tokens(row, row.pages.num_shared_pages, size)))
                count = min(due, left)
                left -= count
            if count:
                work.append(ScheduledSequence(row, count))
            if count == due:
                ready.append(ReadyRow(row, request, depth, 1 + request.nodes - request.depth))
        return work, ready

    def _make_room(
        self, row: DraftRow, tokens: int, requested: Collection[DraftRow], pending_pages: Collection[_Page]
    ) -> bool:
        """Reserve pages for ``tokens`` tokens of a row, closing branches without a request; close the row itself if
        that fails."""
        if row.table is None and not self._open(row, tokens, requested, pending_pages):
            return False
        while not self.cache.reserve(row.pages, tokens):
            if not self._close_another(requested):
                self._close(row)
                return False
        return True

    def _open(
        self, row: DraftRow, tokens: int, requested: Collection[DraftRow], pending_pages: Collection[_Page]
    ) -> bool:
        """Open a row on its cached prefix, unless it has to wait for memory or for another row that computes its next
        page."""
        cache, namespace = self.cache, row.request.namespace
        while True:
            match = row.match = cache.match_prefix(row.tokens, row.num_own - 1, namespace, row.match)
            end = match.nodes[-1] if match.nodes else namespace
            if (end, _get_page_tokens(row, len(match.nodes), cache.page_size)) in pending_pages:
                return False
            if cache.num_tables < len(cache.page_table) and cache.has_room(match, tokens, 0):
                break
            if not self._close_another(requested):
                return False
        row.table, row.match = cache.open_table(match, namespace), None
        row.num_computed = row.table.num_cached_tokens
        return True

    def _close_another(self, requested: Collection[DraftRow]) -> bool:
        """Close the least recently drafted branch without a request."""
        for row in self._rows.values():
            if row in requested:
                break
            if row.table is not None:
                self._close(row)
                return True
        return False

    def _close(self, row: DraftRow) -> None:
        if row.table is not None:
            self.cache.publish(row.table, row.tokens, min(row.num_computed, row.num_own), include_partial=True)
            self.cache.close_table(row.table)
            row.table, row.num_computed = None, 0

    def _publish(self, rows: Iterable[DraftRow]) -> None:
        """Publish full pages of the branches' own tokens."""
        size = self.cache.page_size
        for row in rows:
            own, table = min(row.num_computed, row.num_own), row.table
            if table is not None and own // size > table.num_shared_pages:
                self.cache.publish(table, row.tokens, own, include_partial=False)

    # Drafting.

    def _draft_by_level(
        self, work: Items[ScheduledSequence], ready: Items[ReadyRow], sampler: DraftSampler
    ) -> list[Draft]:
        """Compute the scheduled tokens, then draft level by level until every chain has ended."""
        hidden, last = self._forward(work)
        sampler.move()
        drafts = active = [DraftInProgress(one, place) for place, one in enumerate(ready)]
        width = max(one.width for one in ready)
        ahead = 0
        while True:
            logits = self._model.compute_logits(hidden[torch.tensor([last[one.ready.row] for one in active])])
            branches = np.array([one.place for one in active])
            paths = [one.tokens for one in active]
            best = sampler.best(logits, branches, ahead=np.full(len(active), ahead), width=width, paths=paths)
            added = zip(active, *(array.tolist() for array in best), strict=True)
            active = [one for one, tokens, probs in added if one.add(tokens, probs)]
            if not active:
                return [one.draft for one in drafts]
            for one in active:
                one.ready.row.tokens.append(one.tokens[-1])
            hidden, last = self._forward([ScheduledSequence(one.ready.row, 1) for one in active])
            ahead += 1

    def _draft_fused(
        self,
        chains: FusedChains | DeviceChains,
        work: Items[ScheduledSequence],
        ready: Items[ReadyRow],
        sampler: DraftSampler,
        depth: int,
    ) -> list[Draft]:
        """Draft all levels in one call."""
        if len(work) > len(ready) or max([count for _, count, _ in work]) > DUE:
            in_step = {one.row for one in ready}
            late = [
                ScheduledSequence(row, count - (row in in_step))
                for row, count, _ in work
                if count > DUE or row not in in_step
            ]
            self._forward(late, read=())
        # The same number for each, even if one is computed already: fewer shapes are recorded.
        starts = [ChainStart(row.pages.row, row.tokens[-DUE:], row.num_own) for row, _, _, _ in ready]
        width = max([width for _, _, _, width in ready])
        tokens, probs = chains(starts, sampler, depth, width)
        best, best_probs = tokens[..., 0].T.tolist(), probs[..., 0].T.tolist()
        drafts: list[Draft] = []
        for (row, _, max_depth, _), chain, chain_probs in zip(ready, best, best_probs, strict=True):
            row.tokens += chain[:-1]
            row.num_computed = len(row.tokens)
            drafts.append(possible_chain(chain[:max_depth], chain_probs[:max_depth]))
        if width == 1:
            return drafts
        trees = [DraftInProgress(one, place) for place, one in enumerate(ready)]
        for tree, *found in zip(trees, tokens.swapaxes(0, 1).tolist(), probs.swapaxes(0, 1).tolist(), strict=True):
            for level in zip(*found, strict=True):
                if not tree.add(*level):
                    break
        return [tree.draft for tree in trees]

    def _forward(
        self, work: Items[ScheduledSequence], read: Items[int] | None = None
    ) -> tuple[Tensor, dict[Sequence, int]]:
        """Compute tokens; return the hidden states, valid until the next call, and the row of each sequence's last
        token.

        ``read``: see ``Forward``.
        """
        batch, layout, ordered = build_batch(work, self.cache, self._model.config.first_attention)
        hidden = self._compute(batch, layout, read)
        last: dict[Sequence, int] = {}
        end = 0
        for row, count, _ in ordered:
            row.num_computed += count
            end += count
            last[row] = end - 1
        return hidden, last


def _get_end(row: DraftRow) -> Node | str | None:
    """Return the cached page (or the namespace) before a row's next page."""
    return row.pages.last_node or row.pages.namespace


def _get_page_tokens(row: DraftRow, index: int, size: int) -> tuple[int, ...]:
    return tuple(row.tokens[index * size : (index + 1) * size])
