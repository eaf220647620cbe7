"""A step's guesses: who gets how many, where they find room, and what is learned when the step is done."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence as Items

from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.runner.batch import ScheduledSequence
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.scheduler.sequence import GenerateSequence, Sequence
from engine.speculation.control.controller import MAX_SKIPPED_STEPS, Controller, DraftOutcome
from engine.speculation.drafter import Drafter, DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.stats import SpeculationStats
from kernels.common import warmup

_log = logging.getLogger(__name__)

_PAUSE = 64
"""Steps without guesses after a drafter's first failure; after each other one twice as many as before."""


class Speculator:
    """One model's drafter and its controller.

    Drafts change nothing but the speed, so a drafter that fails ends no request: its error is logged, it starts anew,
    and for a while nobody guesses.
    """

    def __init__(self, drafter: Drafter, controller: Controller, *, context: int, trees: bool) -> None:
        """``context``: most tokens of a sequence. ``trees``: whether the attention can compute them."""
        self.drafter = drafter
        self.controller = controller
        self.stats = SpeculationStats(drafter.kind)
        self._context = context
        self._trees = trees
        self._drafting = self._learning = 0.0
        self._due = 0
        """Branches of the step under way that might get guesses."""
        self._asked = False
        """Whether the drafter was asked for guesses in it."""
        self._tokens = 0
        """That it computes, guesses among them."""
        self._rest = 0
        """Steps to go in which the controller wants to hear nothing."""
        self._watched = {HiddenStateNeeds.NONE: 0, HiddenStateNeeds.LAST: 1, HiddenStateNeeds.ALL: math.inf}[
            drafter.hidden_state_needs
        ]
        """Of these the drafter watches so many, the last ones."""
        self._resting = 0
        """Sequences of the step before them."""
        self._rested = 0
        """Those that went by."""
        self._firsts = 0
        """``warmup.num_first_runs`` when the step under way began."""
        self._began = 0.0
        self._under_way = False
        """Whether a step began that nothing was learned from yet."""
        self._gone: list[GenerateSequence] = []
        """Branches that it ended."""
        self._pause = _PAUSE
        self._paused = 0
        """Steps to go until the drafter is asked again, those not counted that are slept through."""

    def reset(self, cache: KVCache) -> None:
        """The target's cache is this one now, and empty."""
        self._cache = cache
        # What other processes do meanwhile is not the guesses' price; but where a GPU computes, this thread may sleep.
        self._clock = time.perf_counter if cache.data.is_cuda else time.thread_time
        self.drafter.reset(cache)
        self._forget_gone()

    def should_skip_step(self, sequences: int) -> bool:
        """Whether the next step, of so many, is none of its business: nobody guesses, and nothing is learned from it.
        Asked before every step; ``extend`` and ``learn`` follow if it is."""
        if not self._rest:
            return False
        # What does not pay for many branches may pay for few.
        if 8 * abs(sequences - self._resting) > self._resting:
            self._rest = 0
            return False
        if self._rest <= self._watched:
            return False
        self._rest -= 1
        self._rested += 1
        self.stats.record_step(sequences, (), 0.0)
        return True

    def add_drafts(self, work: Items[tuple[Sequence, int]], step_tokens: int) -> list[ScheduledSequence]:
        """The scheduled work with guesses for the branches that are due one token, as far as the step's ``step_tokens``
        and the memory allow: nobody loses its pages to a guess."""
        self._under_way = True
        if self._rest:
            return [ScheduledSequence(sequence, count) for sequence, count in work]
        self._firsts = warmup.num_first_runs
        if self._paused:
            self._paused -= 1
        self._tokens = sum([count for _, count in work])
        started = self._clock()
        wishes = self._wishes(work)
        self._asked = bool(wishes)
        given: dict[Sequence, Draft] = {}
        if wishes:
            for wish, draft in zip(wishes, self._drafts(wishes), strict=True):
                if draft.tokens:
                    given[wish.sequence] = draft = self._fitting(wish, draft, step_tokens - self._tokens, len(work))
                    self._tokens += len(draft.tokens)
        self._began = self._clock()
        self._drafting = self._began - started
        return [ScheduledSequence(sequence, count, given.get(sequence, EMPTY_DRAFT)) for sequence, count in work]

    def update(self, work: Items[ScheduledSequence], outcomes: Items[DraftOutcome], hidden: Tensor) -> None:
        """The step that ``extend`` began is done: what it computed, in the order of the batch, what became of the
        guesses, and the final hidden states ``[tokens, width]``."""
        if self._rest:
            started = self._clock()
            self._advance(_step_results(work, outcomes), hidden)
            self.stats.record_step(len(work), (), self._clock() - started)
            self._rest -= 1
            self._rested += 1
            self._forget_gone()
            return
        ended = self._clock()
        seconds = ended - self._began
        self._advance(
            [] if self.drafter.hidden_state_needs is HiddenStateNeeds.NONE else _step_results(work, outcomes), hidden
        )
        advanced = self._clock()
        advancing = advanced - ended
        drafting = self._drafting + advancing
        # What it took to learn from the step before is no part of a step's price: of most steps nothing is learned.
        self.stats.record_step(self._due, outcomes, drafting + self._learning)
        self._learning = 0.0
        if self._due:
            price = drafting if self._asked else self._price_of_none(self._drafting, advancing)
            first = warmup.num_first_runs > self._firsts
            self._rest = self.controller.update(outcomes, self._tokens, price, seconds, first)
            self._resting = len(work)
            self._learning = self._clock() - advanced
        self._forget_gone()

    def _price_of_none(self, looking: float, advancing: float) -> float:
        """What a step without guesses costs beside itself where there are none for long. Only one of many is then
        looked at; the others cost what the drafter does in every step."""
        if self.drafter.hidden_state_needs is HiddenStateNeeds.ALL:
            return advancing + looking / (1 + MAX_SKIPPED_STEPS)
        return (advancing + looking) / (1 + MAX_SKIPPED_STEPS)

    def release(self, sequence: GenerateSequence) -> None:
        """A branch is over. What its last step taught is learned before it is forgotten."""
        self._gone.append(sequence)
        if not self._under_way:
            self._forget_gone()

    def _forget_gone(self) -> None:
        self._under_way = False
        gone, self._gone = self._gone, []
        for sequence in gone:
            try:
                self.drafter.release(sequence)
            except Exception:
                self._start_anew()

    def _drafts(self, wishes: list[DraftRequest]) -> list[Draft]:
        if self._paused:
            return [EMPTY_DRAFT] * len(wishes)
        try:
            drafts = self.drafter.propose(wishes)
            for wish, draft in zip(wishes, drafts, strict=True):
                # A deeper one would write past the branch's end.
                if len(draft.tokens) > wish.depth < max(draft.depths):
                    raise ValueError(f"guesses are {max(draft.depths)} deep; they may be {wish.depth}")
            # What ends a branch is no guess: whoever draws it where all before it is right ends there.
            going = [
                draft if sequence.terminal_tokens.isdisjoint(draft.tokens) else draft.without(sequence.terminal_tokens)
                for (sequence, _, _), draft in zip(wishes, drafts, strict=True)
            ]
            return self.controller.trim(wishes, going)
        except Exception:
            self._start_anew()
            return [EMPTY_DRAFT] * len(wishes)

    def _advance(self, advances: list[StepResult], hidden: Tensor) -> None:
        if self._paused:
            return
        try:
            self.drafter.observe_step(advances, hidden)
        except Exception:
            self._start_anew()

    def _start_anew(self) -> None:
        """The drafter has just failed."""
        _log.exception("the drafter %s failed; nobody guesses for %d steps", self.drafter.kind, self._pause)
        self._paused, self._pause = self._pause, 2 * self._pause
        self.drafter.reset(self._cache)

    def _wishes(self, work: Items[tuple[Sequence, int]]) -> list[DraftRequest]:
        """What is asked for the branches that are due one token and may write more than that."""
        due: list[GenerateSequence] = []
        rooms: list[int] = []
        for sequence, count in work:
            known = len(sequence.tokens)
            if (
                count == 1
                and sequence.num_computed + 1 == known
                and isinstance(sequence, GenerateSequence)
                and sequence.job.allow_draft
            ):
                # The step draws one token more than are guessed right.
                room = min(sequence.num_prefix_tokens + sequence.branch.max_tokens, self._context) - known - 1
                if room > 0:
                    due.append(sequence)
                    rooms.append(room)
        self._due = len(due)
        if not due:
            return []
        wishes = []
        sizes = self.controller.choose_sizes(due, self._tokens - len(due), self._rested)
        self._rested = 0
        for sequence, room, (depth, nodes) in zip(due, rooms, sizes, strict=True):
            if depth > 0:
                most = min(depth, room)
                if nodes > depth and self._trees:
                    # The slots of a tree lie one after the other like a chain's, and within the context too.
                    nodes = max(most, min(nodes, self._context - len(sequence.tokens)))
                    wishes.append(DraftRequest(sequence, most, nodes))
                else:
                    wishes.append(DraftRequest(sequence, most, most))
        return wishes

    def _fitting(self, wish: DraftRequest, draft: Draft, left: int, running: int) -> Draft:
        """As much of a draft as there is room for. A page is only taken if one is left for each that runs."""
        table, cache, known, guesses = wish.sequence.pages, self._cache, len(wish.sequence.tokens), len(draft.tokens)
        wanted = min(guesses, wish.nodes, left)
        if known + wanted > len(table.pages) * cache.page_size:
            missing = -(-(known + wanted) // cache.page_size) - len(table.pages)
            if cache.num_available_pages - missing >= running:
                cache.reserve(table, known + wanted)
            wanted = max(0, min(wanted, len(table.pages) * cache.page_size - known))
        return draft if wanted == guesses else draft.select(range(wanted))


def _step_results(work: Items[ScheduledSequence], outcomes: Items[DraftOutcome]) -> list[StepResult]:
    """What a step did to the branches that go on."""
    kept = {outcome.sequence: outcome.accepted for outcome in outcomes}
    advances: list[StepResult] = []
    start = 0
    for sequence, count, draft in work:
        behind = start + count
        if isinstance(sequence, GenerateSequence) and sequence.table is not None:
            due, right = range(start, behind), kept.get(sequence)
            rows = [*due, *(behind + guess for guess in right)] if right else due
            advances.append(StepResult(sequence, sequence.num_computed - len(rows), rows))
        start = behind + len(draft.tokens)
    return advances
