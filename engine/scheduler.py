"""Which tokens are computed next, and who gets memory for them.

There are no prefill and decode phases. Every sequence has tokens whose keys and values are not computed yet, one for a
branch that is being sampled and many for a new prompt, and each step computes as many as its token budget allows.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from engine.cache.kv import KVCache
from engine.sequence import Job, ScoreSequence, Sequence

_BY_AGE = attrgetter("order")


@dataclass(slots=True)
class Schedule:
    """The work of one step."""

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with the number of tokens to compute; pages for them are reserved."""
    declined: list[ScoreSequence] = field(default_factory=list)
    """Items that would need more tokens than their ``max_compute``; ``cached`` says what the cache had."""


class Scheduler:
    """First come, first served, with one exception: who would compute what an older sequence is just computing, waits.

    When memory runs out, the youngest sequence gives its pages back and later starts again (whatever of them is still
    cached is found again). The oldest can therefore always go on, and every sequence finally is the oldest.
    """

    def __init__(self, cache: KVCache, *, max_running: int, step_tokens: int) -> None:
        self.cache = cache
        self.running: list[Sequence] = []
        """By age, like ``waiting``."""
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self.prompt_tokens = 0
        """Tokens of sequences that were admitted, and how many of them were cached."""
        self.cached_tokens = 0
        self._arrivals = itertools.count()
        self._max_running = max_running
        self._step_tokens = step_tokens

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues new sequences behind all others."""
        for sequence in sequences:
            sequence.order = next(self._arrivals)
            self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Chooses the work of the next step and reserves its memory."""
        schedule = Schedule()
        preemptions = self.preemptions
        budget = self._continue_running(schedule, self._step_tokens)
        if preemptions == self.preemptions:
            self._admit(schedule, budget)
        return schedule

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out; its committed tokens stay cached."""
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._leave(sequence)

    def drop(self, job: Job) -> None:
        """Takes all sequences of a job out."""
        self.waiting = [sequence for sequence in self.waiting if sequence.job is not job]
        for sequence in job.sequences:
            if sequence.table is not None:
                self.finish(sequence)

    def _continue_running(self, schedule: Schedule, budget: int) -> int:
        index = 0
        # The list shrinks from its end while the loop runs: the youngest are preempted, and none of them had its turn.
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            while not self.cache.reserve(sequence.pages, sequence.computed + count):
                if self._preempt_youngest() is sequence:
                    return budget
            schedule.work.append((sequence, count))
            budget -= count
            index += 1
        return budget

    def _admit(self, schedule: Schedule, budget: int) -> None:
        computing = [sequence for sequence in self.running if self._has_page_to_share(sequence)]
        left: list[Sequence] = []
        admitted = 0
        for sequence in self.waiting:
            if budget <= 0 or len(self.running) >= self._max_running:
                break
            if any(self._shares(sequence, other) for other in computing):
                left.append(sequence)
                admitted += 1
                continue
            # Each running sequence keeps a page in reserve, or the newcomer would be preempted at once.
            if self.running and not self.cache.fits(sequence.tokens, sequence.limit, reserve=len(self.running)):
                break
            admitted += 1
            budget -= self._start(sequence, budget, schedule)
            if sequence.table is not None and self._has_page_to_share(sequence):
                computing.append(sequence)
        self.waiting = left + self.waiting[admitted:]

    def _has_page_to_share(self, sequence: Sequence) -> bool:
        return sequence.prefix - sequence.computed >= self.cache.page_size

    def _shares(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether ``other`` is about to compute at least a page's worth of tokens that ``sequence`` needs too."""
        limit = min(sequence.limit, other.prefix)
        shared = _common_prefix(sequence.tokens, other.tokens, limit)
        if shared <= other.computed or shared < self.cache.page_size:
            return False
        return shared - self.cache.cached(sequence.tokens, sequence.limit) >= self.cache.page_size

    def _start(self, sequence: Sequence, budget: int, schedule: Schedule) -> int:
        table = self.cache.open(sequence.tokens, sequence.limit)
        needed = len(sequence.tokens) - table.cached_tokens
        if sequence.cached is None:
            sequence.cached = table.cached_tokens
            if isinstance(sequence, ScoreSequence) and needed > sequence.max_compute:
                self.cache.close(table)
                schedule.declined.append(sequence)
                return 0
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += table.cached_tokens
        sequence.table, sequence.computed = table, table.cached_tokens
        bisect.insort(self.running, sequence, key=_BY_AGE)
        count = min(needed, budget)
        if not self.cache.reserve(table, sequence.computed + count):
            raise RuntimeError("a sequence was admitted that does not fit")
        schedule.work.append((sequence, count))
        return count

    def _preempt_youngest(self) -> Sequence:
        victim = self.running.pop()
        self._leave(victim)
        bisect.insort(self.waiting, victim, key=_BY_AGE)
        self.preemptions += 1
        return victim

    def _leave(self, sequence: Sequence) -> None:
        self.cache.publish(sequence.pages, sequence.tokens, sequence.computed, tail=True)
        self.cache.close(sequence.pages)
        sequence.table = None


def _common_prefix(left: list[int], right: list[int], limit: int) -> int:
    limit = min(limit, len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next(index for index in range(limit) if left[index] != right[index])
