"""A step's guesses: who gets how many, where they find room, and what is learned when the step is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Items

from torch import Tensor

from engine.batch import Work
from engine.cache.kv import KVCache
from engine.sequence import GenerateSequence, Sequence
from engine.speculation.controller import REST, Controller, Outcome
from engine.speculation.draft import EMPTY, Advance, Draft, Drafter, Watch, Wish
from engine.speculation.tally import Tally
from kernels.firsts import Firsts

_log = logging.getLogger(__name__)

_PAUSE = 64
"""Steps without guesses after a drafter's first failure; after each other one twice as many as before."""


class Speculator:
    """One model's drafter and its controller.

    Guesses change nothing but the speed, so a drafter that fails ends no request: its error is logged, it starts anew,
    and for a while nobody guesses.
    """

    def __init__(self, drafter: Drafter, controller: Controller, *, context: int, trees: bool) -> None:
        """``context``: most tokens of a sequence. ``trees``: whether the attention can compute them."""
        self.drafter = drafter
        self.controller = controller
        self.tally = Tally(drafter.kind)
        self._context = context
        self._trees = trees
        self._drafting = self._learning = 0.0
        self._due = 0
        """Branches of the step under way that might get guesses."""
        self._asked = False
        """Whether the drafter was asked for guesses in it."""
        self._rest = 0
        """Steps to go in which the controller wants to hear nothing."""
        self._resting = 0
        """Sequences of the step before them."""
        self._firsts = 0
        """``Firsts.count`` when the step under way began."""
        self._began = 0.0
        self._under_way = False
        """Whether a step began that nothing was learned from yet."""
        self._gone: list[GenerateSequence] = []
        """Branches that it ended."""
        self._pause = _PAUSE
        self._paused = 0
        """Steps to go until the drafter is asked again."""

    def reset(self, cache: KVCache) -> None:
        """The target's cache is this one now, and empty."""
        self._cache = cache
        # What other processes do meanwhile is not the guesses' price; but where a GPU computes, this thread may sleep.
        self._clock = time.perf_counter if cache.data.is_cuda else time.thread_time
        self.drafter.reset(cache)
        self._forget_gone()

    def extend(self, work: Items[tuple[Sequence, int]], step_tokens: int) -> list[Work]:
        """The scheduled work with guesses for the branches that are due one token, as far as the step's ``step_tokens``
        and the memory allow: nobody loses its pages to a guess."""
        self._under_way = True
        self._firsts = Firsts.count
        if self._paused:
            self._paused -= 1
        if self._rest:
            # What does not pay for many branches may pay for few.
            if 8 * abs(len(work) - self._resting) <= self._resting:
                return [Work(sequence, count) for sequence, count in work]
            self._rest = 0
        tokens = sum(count for _, count in work)
        given: dict[Sequence, Draft] = {}
        started = self._clock()
        wishes = self._wishes(work, tokens)
        self._asked = bool(wishes)
        if wishes:
            drafts = self._drafts(wishes)
            left = step_tokens - tokens
            for wish, draft in zip(wishes, drafts, strict=True):
                given[wish.sequence] = fitting = self._fit(wish, draft, left, len(work))
                left -= len(fitting.tokens)
        self._began = self._clock()
        self._drafting = self._began - started
        return [Work(sequence, count, given.get(sequence, EMPTY)) for sequence, count in work]

    def learn(self, work: Items[Work], outcomes: Items[Outcome], hidden: Tensor) -> None:
        """The step that ``extend`` began is done: what it computed, in the order of the batch, what became of the
        guesses, and the final hidden states ``[tokens, width]``."""
        if self._rest:
            self._rest -= 1
            self.tally.idle(sum(count == 1 for _, count, _ in work))
            watches = self.drafter.watches
            if watches is Watch.NONE or (watches is Watch.LAST and self._rest):
                self._forget_gone()
                return
        ended = self._clock()
        seconds = ended - self._began
        self._advance([] if self.drafter.watches is Watch.NONE else _advances(work, outcomes), hidden)
        advanced = self._clock()
        advancing = advanced - ended
        # What it took to learn from the step before is part of the price: a small model's steps are as short.
        drafting = self._drafting + self._learning
        self.tally.count(self._due, outcomes, drafting + advancing)
        self._learning = 0.0
        if self._due:
            tokens = sum(count + len(draft.tokens) for _, count, draft in work)
            price = drafting + advancing if self._asked else self._price_of_none(drafting, advancing)
            first = Firsts.count > self._firsts
            self._rest = self.controller.learn(outcomes, tokens, price, seconds, first)
            self._resting = len(work)
            self._learning = self._clock() - advanced
        self._forget_gone()

    def _price_of_none(self, looking: float, advancing: float) -> float:
        """What a step without guesses costs beside itself where there are none for long. Only one of many is then
        looked at; the others cost what the drafter does in every step."""
        if self.drafter.watches is Watch.ALL:
            return advancing + looking / (1 + REST)
        return (advancing + looking) / (1 + REST)

    def forget(self, sequence: GenerateSequence) -> None:
        """A branch is over. What its last step taught is learned before it is forgotten."""
        self._gone.append(sequence)
        if not self._under_way:
            self._forget_gone()

    def _forget_gone(self) -> None:
        self._under_way = False
        gone, self._gone = self._gone, []
        for sequence in gone:
            try:
                self.drafter.forget(sequence)
            except Exception:
                self._start_anew()

    def _drafts(self, wishes: list[Wish]) -> list[Draft]:
        if self._paused:
            return [EMPTY] * len(wishes)
        try:
            drafts = self.drafter.propose(wishes)
            going = [draft.before(wish.sequence.final) for wish, draft in zip(wishes, drafts, strict=True)]
            return self.controller.trim(wishes, going)
        except Exception:
            self._start_anew()
            return [EMPTY] * len(wishes)

    def _advance(self, advances: list[Advance], hidden: Tensor) -> None:
        if self._paused:
            return
        try:
            self.drafter.advance(advances, hidden)
        except Exception:
            self._start_anew()

    def _start_anew(self) -> None:
        """The drafter has just failed."""
        _log.exception("the drafter %s failed; nobody guesses for %d steps", self.drafter.kind, self._pause)
        self._paused, self._pause = self._pause, 2 * self._pause
        self.drafter.reset(self._cache)

    def _wishes(self, work: Items[tuple[Sequence, int]], tokens: int) -> list[Wish]:
        """What is asked for the branches that are due one token and may write more than that."""
        due: list[tuple[GenerateSequence, int]] = []
        for sequence, count in work:
            if not isinstance(sequence, GenerateSequence) or not sequence.job.draft:
                continue
            if count == 1 and sequence.computed + 1 == len(sequence.tokens):
                written = len(sequence.written) - len(sequence.branch.generated)
                # The step draws one token more than are guessed right.
                room = min(sequence.branch.max_tokens - written, self._context - len(sequence.tokens)) - 1
                if room > 0:
                    due.append((sequence, room))
        self._due = len(due)
        if not due:
            return []
        sizes = self.controller.sizes([sequence for sequence, _ in due], tokens - len(due))
        least, wishes = self.controller.least, []
        for (sequence, room), (depth, nodes) in zip(due, sizes, strict=True):
            # The slots of a tree lie one after the other like a chain's, and within the context too.
            left = self._context - len(sequence.tokens) if self._trees and nodes > depth else 0
            depth = min(depth, room)
            if depth > 0:
                wishes.append(Wish(sequence, depth, max(depth, min(nodes, left)), least))
        return wishes

    def _fit(self, wish: Wish, draft: Draft, left: int, running: int) -> Draft:
        """As much of a draft as there is room for. A page is only taken if one is left for each that runs."""
        table, cache, known, guesses = wish.sequence.pages, self._cache, len(wish.sequence.tokens), len(draft.tokens)
        wanted = min(guesses, wish.nodes, left)
        missing = -(-(known + wanted) // cache.page_size) - len(table.pages)
        if missing > 0:
            if cache.available - missing >= running:
                cache.reserve(table, known + wanted)
            wanted = max(0, min(wanted, len(table.pages) * cache.page_size - known))
        return draft if wanted == guesses else draft.part(range(wanted))


def _advances(work: Items[Work], outcomes: Items[Outcome]) -> list[Advance]:
    """What a step did to the branches that go on."""
    kept = {outcome.sequence: outcome.accepted for outcome in outcomes}
    advances: list[Advance] = []
    start = 0
    for sequence, count, draft in work:
        behind = start + count
        if isinstance(sequence, GenerateSequence) and sequence.table is not None:
            due, right = range(start, behind), kept.get(sequence)
            rows = [*due, *(behind + guess for guess in right)] if right else due
            advances.append(Advance(sequence, sequence.computed - len(rows), rows))
        start = behind + len(draft.tokens)
    return advances
