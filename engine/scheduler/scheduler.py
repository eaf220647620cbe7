"""Which tokens are computed next, and who gets memory for them.

There are no prefill and decode phases. Every sequence has tokens whose keys and values are not computed yet, one for a
branch that is being sampled and many for a new prompt, and each step computes as many as its token budget allows.

**Order.** Sampling branches get their one token first, so that a long prompt stalls nobody; prompts share the rest in
chunks, and always get a quarter of the step. Jobs that wait start by priority; then those that were overtaken too
often, first come first served; then by deadline; then by how much of their prefix is cached; then by age. Only the
first of a long queue are ranked so: beyond them it is first come, first served. A sequence that needs the very page
that another one is computing waits for it.

**Progress.** When memory runs out, a sequence gives its pages back and later starts again; what of them is still cached
is found again. It is never the *head*, the oldest of the highest priority that runs, and the head alone always fits,
since the pool bounds the context: so the head finishes. A job that waits is overtaken by at most ``MAX_BYPASSES``
admissions before it is the next to start among equals, and nobody starts before it until it fits; when it runs and
those before it have finished, it is the head. Nothing is reserved for the tokens that a branch may still generate. Yet
a sequence that lost its pages is not back before somebody has left: it frees ``n`` pages, of which the shortage takes
one at least, and to start it needs these ``n`` and one for each that runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

from engine.cache.paged_kv import KVCache
from engine.cache.radix_tree import Match, Node
from engine.scheduler.sequence import Job, ScoreSequence, Sequence

MAX_BYPASSES = 128
"""Admissions after which a job that still waits goes first among those of its priority."""

WINDOW = 128
"""Jobs at the head of the queue that are ranked, and sequences that are looked at in one step without being started."""

_SIBLINGS = 16
"""Sequences of one job that are looked at in vain before the next job has its turn."""

_BY_AGE = attrgetter("order")

_Page = tuple[Node | str | None, tuple[int, ...]]
"""A page that is being computed: the cached page (or the namespace) that it comes after, and its tokens."""


@dataclass(slots=True)
class Schedule:
    """The work of one step."""

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with the number of tokens to compute; pages for them are reserved."""
    over_budget: list[ScoreSequence] = field(default_factory=list)
    """Items that would need more tokens than their ``max_compute``; ``cached`` says what the cache had."""


class Scheduler:
    """The jobs of one model. ``max_running`` sequences run at once, ``step_tokens`` tokens are computed in a step."""

    def __init__(self, cache: KVCache, *, max_running: int, step_tokens: int) -> None:
        self.cache = cache
        self.running: dict[Sequence, None] = {}
        """In the order of their start."""
        self.num_waiting = 0
        """Sequences that wait."""
        self.num_preemptions = 0
        self.prompt_tokens = 0
        """Tokens of sequences that were admitted, and how many of them were cached."""
        self.cached_tokens = 0
        self._queue: list[tuple[int, int, Job]] = []
        """Jobs with sequences that wait, by (negated priority, age)."""
        self._arrivals = itertools.count()
        self._admissions = 0
        self._max_running = max_running
        self._step_tokens = step_tokens

    def add(self, job: Job) -> None:
        """Queues the sequences of a new job."""
        first, match = job.sequences[0], Match()
        for sequence in job.sequences:
            # Branches of one prefix wait for the same pages, which are looked up once for all of them.
            same = sequence.max_cached == first.max_cached and sequence.tokens == first.tokens
            sequence.order, sequence.match = next(self._arrivals), match if same else None
        job.waiting, job.order, job.admissions_at_arrival = [], job.sequences[0].order, self._admissions
        self._queue_again(job, list(job.sequences))

    def reset(self) -> None:
        """Forgets all jobs; the cache was emptied. What was counted stays."""
        self.running.clear()
        self._queue.clear()
        self.num_waiting = 0

    def schedule(self) -> Schedule:
        """Chooses the work of the next step and reserves its memory."""
        preemptions = self.num_preemptions
        schedule = Schedule()
        budget = self._continue_running(schedule)
        if self._queue and budget > 0 and preemptions == self.num_preemptions:
            self._admit(schedule, budget)
        return schedule

    def finish(self, sequence: Sequence) -> None:
        """Takes a running sequence out; its committed tokens stay cached, and pinned if the job has a lease."""
        del self.running[sequence]
        table, job = sequence.pages, sequence.job
        end = self.cache.publish(table, sequence.tokens, sequence.num_computed, tail=True)
        self.cache.close(table)
        sequence.table = None
        if job.lease is not None and end is not None:
            self.cache.leases.pin(job.lease, job.namespace, end)

    def remove_job(self, job: Job) -> None:
        """Takes all sequences of a job out."""
        self._queue_again(job, [])
        for sequence in job.sequences:
            if sequence.table is not None:
                self.finish(sequence)

    def check_invariants(self) -> None:
        """Raises ``RuntimeError`` when the queue, the running sequences and the cache do not fit together."""
        self.cache.check()
        waiting = [sequence for _, _, job in self._queue for sequence in job.waiting]
        if self._queue != sorted(self._queue) or not all(job.waiting for _, _, job in self._queue):
            raise RuntimeError("the queue is out of order, or has a job of which nothing waits")
        if len(waiting) != self.num_waiting or any(sequence.table is not None for sequence in waiting):
            raise RuntimeError("the sequences that wait were not counted, or one of them runs")
        if len(self.running) > self._max_running or self.cache.open_tables != len(self.running):
            raise RuntimeError("page tables and running sequences do not match")
        for sequence in self.running:
            table = sequence.pages
            cached = list(itertools.chain.from_iterable(node.key for node in self.cache.path(table)))
            if len(cached) > sequence.num_computed or cached != sequence.tokens[: len(cached)]:
                raise RuntimeError(f"row {table.row} published other tokens than it has computed")
            if sequence.num_computed > len(table.pages) * self.cache.page_size:
                raise RuntimeError(f"row {table.row} has computed more tokens than it has room for")

    # Running sequences.

    def _continue_running(self, schedule: Schedule) -> int:
        """Gives the running sequences their share of the step; answers how many tokens are left of it."""
        size, preemptions = self.cache.page_size, self.num_preemptions
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            (prompts if len(sequence.tokens) - sequence.num_computed > 1 else decoding).append(sequence)
        starting = self._queue and len(self.running) < self._max_running
        most = max(1, self._step_tokens - (max(1, self._step_tokens // 4) if prompts or starting else 0))
        if len(decoding) > most:
            decoding = sorted(decoding, key=_rank)[:most]
        for sequence in decoding:
            table = sequence.table
            if table is not None and len(sequence.tokens) > len(table.pages) * size:
                self._make_room(sequence, len(sequence.tokens))
        work = [(sequence, 1) for sequence in decoding]
        budget = self._step_tokens - len(work)
        for sequence in sorted(prompts, key=_rank):
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            if count > 0 and self._make_room(sequence, sequence.num_computed + count):
                work.append((sequence, count))
                budget -= count
        if preemptions != self.num_preemptions:
            work = [(sequence, count) for sequence, count in work if sequence.table is not None]
        schedule.scheduled = work
        return budget

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Reserves pages, at the cost of others if need be; ``False`` if the sequence itself had to give way."""
        while sequence.table is not None:
            if self.cache.reserve(sequence.table, tokens):
                return True
            self._preempt()
        return False

    def _preempt(self) -> None:
        """Sends one sequence back to wait: of the lowest priority, then what costs least to compute again, then the
        youngest."""
        head = min(self.running, key=_rank)
        others = [sequence for sequence in self.running if sequence is not head]
        if not others:
            raise RuntimeError("a sequence that runs alone does not fit into the pool")
        victim = min(others, key=lambda one: (one.job.priority, self._cost(one), -one.order))
        self.finish(victim)
        self._queue_again(victim.job, sorted([*victim.job.waiting, victim], key=_BY_AGE))
        self.num_preemptions += 1

    def _cost(self, sequence: Sequence) -> int:
        """Pages that would be lost: memory is short, so what only this sequence and the tree hold will be evicted."""
        holders, nodes, lost = self.cache.pool.holders, self.cache.tree.nodes, 0
        for page in reversed(sequence.pages.pages):
            if holders[page] > (2 if page in nodes else 1):
                break
            lost += 1
        return lost

    # Waiting sequences.

    def _admit(self, schedule: Schedule, budget: int) -> None:
        """Starts sequences while there is budget, a place and memory. Each running sequence keeps a page in reserve:
        without one, the newcomer would soon be sent back."""
        computing: dict[_Page, Sequence] = {}
        promised = 0
        for sequence in self.running:
            promised += self._underway(sequence, computing)
        looks = WINDOW
        for job in self._ranked():
            left: list[Sequence] = []
            started, full = 0, False
            for sequence in job.waiting:
                full = budget <= 0 or len(self.running) >= self._max_running or looks == 0
                if full or len(left) == _SIBLINGS:
                    break
                match = self._match(sequence)
                if self._waits_for(sequence, match, computing):
                    left.append(sequence)
                    looks -= 1
                    continue
                reserve = promised + len(self.running)
                full = bool(self.running) and not self.cache.fits(match, len(sequence.tokens) + 1, reserve)
                if full:
                    break
                started += 1
                budget -= self._start(sequence, match, budget, schedule)
                if sequence.table is not None:
                    promised += self._underway(sequence, computing)
            self._queue_again(job, left + job.waiting[started + len(left) :])
            if full:
                break

    def _ranked(self) -> list[Job]:
        """The jobs at the head of the queue, who starts first before who starts last."""

        def rank(entry: tuple[int, int, Job]) -> tuple[int, bool, float, int, int]:
            falling, order, job = entry
            if self._admissions - job.admissions_at_arrival >= MAX_BYPASSES:
                return falling, False, 0.0, 0, order
            return falling, True, job.deadline, -self._match(job.waiting[0]).tokens, order

        window = self._queue[:WINDOW]
        return [job for _, _, job in (sorted(window, key=rank) if len(window) > 1 else window)]

    def _match(self, sequence: Sequence) -> Match:
        known, namespace = sequence.match, sequence.job.namespace
        sequence.match = self.cache.find(sequence.tokens, sequence.max_cached, namespace, known)
        return sequence.match

    def _underway(self, sequence: Sequence, computing: dict[_Page, Sequence]) -> int:
        """Notes the page that a running sequence computes, and answers how many pages its known tokens still need."""
        size, table = self.cache.page_size, sequence.pages
        if sequence.num_computed < sequence.num_prefix_tokens:
            start = table.shared * size
            key = tuple(sequence.tokens[start : min(start + size, sequence.num_prefix_tokens)])
            computing.setdefault((table.node or table.namespace, key), sequence)
        if len(sequence.tokens) - sequence.num_computed <= 1:
            return 0
        return max(0, -(-(len(sequence.tokens) + 1) // size) - len(table.pages))

    def _waits_for(self, sequence: Sequence, match: Match, computing: dict[_Page, Sequence]) -> bool:
        """Whether another sequence is computing the page that this one needs next, and enough to be worth a wait."""
        if not computing:
            return False
        size, tokens = self.cache.page_size, sequence.tokens
        start = len(match.nodes) * size
        place = match.nodes[-1] if match.nodes else sequence.job.namespace
        other = computing.get((place, tuple(tokens[start : start + size])))
        if other is None:
            return False
        shared = _common_prefix(tokens, other.tokens, start, min(sequence.max_cached, other.num_prefix_tokens))
        return shared - match.tokens >= max(1, size // 2)

    def _start(self, sequence: Sequence, match: Match, budget: int, schedule: Schedule) -> int:
        table = self.cache.open(match, sequence.job.namespace)
        sequence.match = None
        needed = len(sequence.tokens) - table.cached_tokens
        if sequence.num_cached is None:
            sequence.num_cached = table.cached_tokens
            if isinstance(sequence, ScoreSequence) and needed > sequence.max_compute:
                self.cache.close(table)
                schedule.over_budget.append(sequence)
                return 0
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += table.cached_tokens
        sequence.table, sequence.num_computed = table, table.cached_tokens
        self.running[sequence] = None
        self._admissions += 1
        count = min(needed, budget)
        if not self.cache.reserve(table, sequence.num_computed + count):
            raise RuntimeError("a sequence was admitted that does not fit")
        schedule.scheduled.append((sequence, count))
        return count

    def _queue_again(self, job: Job, waiting: list[Sequence]) -> None:
        """What waits of a job has changed."""
        if waiting and not job.waiting:
            insort(self._queue, _place(job))
        elif job.waiting and not waiting:
            del self._queue[bisect_left(self._queue, _place(job))]
        self.num_waiting += len(waiting) - len(job.waiting)
        job.waiting = waiting


def _place(job: Job) -> tuple[int, int, Job]:
    return -job.priority, job.order, job


def _rank(sequence: Sequence) -> tuple[int, int]:
    return -sequence.job.priority, sequence.order


def _common_prefix(left: list[int], right: list[int], start: int, limit: int) -> int:
    """How many of the first ``limit`` tokens are the same; the first ``start`` are known to be."""
    if left[start:limit] == right[start:limit]:
        return limit
    return next(index for index in range(start, limit) if left[index] != right[index])
