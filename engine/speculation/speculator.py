"""A step's guesses: who gets how many, where they find room, and what is learned when the step is done."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from typing import NamedTuple

from torch import Tensor

from engine.batch import Work
from engine.cache.kv import KVCache
from engine.sequence import GenerateSequence, Sequence
from engine.speculation.controller import Controller, Outcome
from engine.speculation.draft import Advance, Draft, Drafter, Wish


class Speculator:
    """One model's drafter with its controller."""

    def __init__(self, drafter: Drafter, controller: Controller, *, context: int, chains: bool) -> None:
        """``context``: most tokens of a sequence. ``chains``: the attention cannot compute trees."""
        self.drafter = drafter
        self._controller = controller
        self._context = context
        self._chains = chains
        self._drafting = 0.0

    def reset(self, cache: KVCache) -> None:
        """The target's cache is this one now, and empty."""
        self._cache = cache
        self.drafter.reset(cache)

    def extend(self, work: Items[tuple[Sequence, int]], step_tokens: int) -> list[Work]:
        """The scheduled work with guesses for the branches that are due one token, as far as the step's ``step_tokens``
        and the memory allow: nobody is sent back for a guess."""
        self._drafting = 0.0
        due = {sequence: room for sequence, count in work if (room := self._room(sequence, count)) > 0}
        tokens = sum(count for _, count in work)
        wishes = self._wishes(due, tokens - len(due))
        if not wishes:
            return [Work(sequence, count) for sequence, count in work]
        started = time.perf_counter()
        drafts = self._controller.trim(self.drafter.propose(wishes), tokens - len(due))
        self._drafting = time.perf_counter() - started
        given: dict[Sequence, Draft] = {}
        left = step_tokens - tokens
        for wish, draft in zip(wishes, drafts, strict=True):
            given[wish.sequence] = draft = self._fit(wish, draft, min(left, wish.nodes), len(work))
            left -= len(draft)
        return [Work(sequence, count, given[sequence]) if sequence in given else Work(sequence, count) for sequence, count in work]
