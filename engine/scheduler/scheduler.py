"""Scheduling of one model's sequences: choose the tokens of each step and reserve pages for them.

There are no prefill and decode phases. Every sequence has tokens whose keys and values are not computed yet, one for a
decoding branch and many for a new prompt, and each step computes as many as its token budget allows.

**Order.** Decoding branches get their one token first, so that a long prompt does not stall them; prompts share the
rest in chunks, and always get at least a quarter of the step. Waiting requests start by priority; then those that were
bypassed too often, first come, first served; then by deadline; then by the length of their cached prefix; then by age.
Only the first ``QUEUE_WINDOW`` of them are ranked this way; the rest is first come, first served. A sequence whose next
page is being computed by another sequence waits for that page.

**Background.** Requests of a negative priority yield: while others have work, their running sequences pause, keep their
pages as long as these are not needed, and take part in one step of ``BACKGROUND_INTERVAL`` only.

**Progress.** When memory runs out, a running sequence is preempted: it frees its pages and starts again later, from
what is still cached of them. The *head*, the oldest running sequence of the highest priority, is never preempted, and
it always fits alone, because the pool bounds the context: so the head finishes. After ``MAX_BYPASSES`` admissions of
others a waiting request is the next to start among those of its priority, and no other starts before it fits; once the
sequences before it have finished, it is the head. Nothing is reserved for tokens that a branch may still generate.
Preemption does not thrash: a preempted sequence frees ``n`` pages, at least one of which is taken at once, and needs
``n`` pages and one for each running sequence to start again, so another sequence has to finish first.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import abc
from dataclasses import dataclass, field
from operator import attrgetter

from engine.cache.page_drops import PageDrops
from engine.cache.page_table import PageTable
from engine.cache.paged_kv import KVCache
from engine.cache.radix_tree import Match, Node
from engine.cache.retained import RetainedTable
from engine.offloading.loads import Loader
from engine.scheduler.sequence import Request, ScoreSequence, Sequence

MAX_BYPASSES = 128
"""Admissions after which a request that still waits goes first among those of its priority."""

BACKGROUND_INTERVAL = 32
"""Steps of which one is shared with sequences of negative priority, while there are others."""

QUEUE_WINDOW = 128
"""Maximum number of queued requests that are ranked, and of sequences examined in one step without starting."""

_MAX_POSTPONED = 16
"""Maximum number of sequences of one request that are examined without starting before the next request is examined."""

_ARRIVAL_ORDER = attrgetter("order")
_PREEMPTED = "\0preempted "
"""Beginning of the keys under which preempted sequences claim their pages; no client's key begins so."""

_PageKey = tuple[Node | str | None, tuple[int, ...]]
"""A page that is being computed: the cached page (or the namespace) before it, and its tokens."""


@dataclass(slots=True)
class Schedule:
    """The work of one step."""

    scheduled: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with the number of tokens to compute; pages for these are reserved."""
    over_budget: list[ScoreSequence] = field(default_factory=list)
    """Items that would need more tokens than their ``max_compute``."""


@dataclass(slots=True)
class _Admission:
    """Limits that shrink while one step admits sequences."""

    num_tokens: int
    num_candidates: int = QUEUE_WINDOW
    """Sequences that may still be examined without starting."""
    reserved_pages: int = 0
    """Pages that running prompts still need."""
    pending_pages: dict[_PageKey, Sequence] = field(default_factory=dict)
    """Pages that running sequences compute next, with the first sequence that does."""
    is_foreground: bool = False
    """True if only requests start that do not yield; they may preempt those that do."""


class Scheduler:
    """The requests of one model: at most ``max_running`` sequences run at once, ``step_tokens`` tokens per step."""

    def __init__(self, cache: KVCache, *, max_running: int, step_tokens: int, loader: Loader | None = None) -> None:
        """``loader``: brings prefixes back from the lower tier of the cache, if it has one."""
        self.cache = cache
        self.loader = loader
        self.running: dict[Sequence, None] = {}
        """Running sequences in the order of their start."""
        self.num_waiting = 0
        self.num_preemptions = 0
        self.num_dropped_tokens = 0
        """Tokens whose keys were dropped for a bound on those of a thought."""
        self.prompt_tokens = 0
        """Tokens of all sequences at their first admission."""
        self.cached_tokens = 0
        """Cached ones among ``prompt_tokens``."""
        self._queue: list[tuple[int, int, Request]] = []
        """Requests with waiting sequences, sorted by (negated priority, arrival)."""
        self._arrivals = itertools.count()
        self._num_admissions = 0
        self._num_foreground_steps = 0
        """Steps in a row in which sequences of negative priority paused."""
        self._max_running = max_running if cache.states is None else min(max_running, cache.states.max_running)
        self._step_tokens = step_tokens

    def add(self, request: Request) -> None:
        """Queue the sequences of a new request."""
        first, match = request.sequences[0], Match()
        for sequence in request.sequences:
            # Branches of one prefix wait for the same pages: one shared match, so that they are looked up once.
            is_same = sequence.max_cached == first.max_cached and sequence.tokens == first.tokens
            sequence.order, sequence.match = next(self._arrivals), match if is_same else None
        request.waiting, request.order = [], first.order
        request.admissions_at_arrival = self._num_admissions
        self._set_waiting(request, list(request.sequences))

    def reset(self) -> None:
        """Remove all requests after the cache was emptied. Counters stay."""
        self.running.clear()
        self._queue.clear()
        self.num_waiting = 0
        if self.loader is not None:
            self.loader.reset()

    def schedule(self) -> Schedule:
        """Choose the work of the next step and reserve its memory."""
        schedule = Schedule()
        if self.loader is not None:
            self.loader.poll()
        has_background = any(sequence.request.priority < 0 for sequence in self.running)
        if has_background and self._num_foreground_steps < BACKGROUND_INTERVAL - 1:
            self._plan(schedule, foreground=[each for each in self.running if each.request.priority >= 0])
            if schedule.scheduled:
                self._num_foreground_steps += 1
                return schedule
        self._num_foreground_steps = 0
        self._plan(schedule)
        return schedule

    def _plan(self, schedule: Schedule, foreground: list[Sequence] | None = None) -> None:
        """Schedule all running sequences, or some of those that do not yield, and start others with what is left."""
        num_tokens, has_preempted = self._continue_running(schedule, self.running if foreground is None else foreground)
        if self._queue and num_tokens > 0 and not has_preempted:
            self._admit(schedule, num_tokens, is_foreground=foreground is not None)

    def finish(self, sequence: Sequence, *, has_ended: bool = True) -> None:
        """Remove a running sequence; its computed tokens stay cached, and pinned if the request has a pin key."""
        del self.running[sequence]
        table, request = sequence.pages, sequence.request
        if has_ended and table.num_dropped_pages and sequence.drops is not None and sequence.error is None:
            self._retain(sequence, table, sequence.drops)
            return
        end = self.cache.publish(table, sequence.cache_keys, sequence.num_computed, include_partial=True)
        self.cache.keep_last_state(table, sequence.cache_keys, sequence.num_computed)
        self.cache.close_table(table)
        sequence.table = None
        # What follows an invocation is read once, and would keep a branch pinned that its search has pruned.
        if request.pin_key is not None and end is not None and not sequence.adapter_start:
            self.cache.pins.pin(request.pin_key, request.namespace, end)

    def _retain(self, sequence: Sequence, table: PageTable, drops: PageDrops) -> None:
        """Close the table of an ended branch that lost pages, and keep it if the request has a pin key.

        What follows an invocation or is scored is read once, and goes on with a table that is kept.
        """
        key, sequence.table = sequence.request.pin_key, None
        if key is None or sequence.adapter_start or isinstance(sequence, ScoreSequence):
            self.cache.close_table(table)
            return
        if table.last_node is not None:
            self.cache.pins.pin(key, sequence.request.namespace, table.last_node)
        tokens = sequence.cache_keys[: sequence.num_computed]
        self.cache.retain_table(table, tokens, drops, key=key, scope=sequence.scope)

    def remove_request(self, request: Request) -> None:
        """Remove all sequences of a request."""
        self._set_waiting(request, [])
        for sequence in request.sequences:
            self._end_waiting(sequence)
            if sequence.table is not None:
                self.finish(sequence)

    def may_preempt(self) -> bool:
        """Return True if the next step may find too few pages for the running sequences."""
        if self._queue and self._queue[0][0] <= 0 and any(sequence.request.priority < 0 for sequence in self.running):
            return True  # for the first one in the queue
        size, num_available = self.cache.page_size, self.cache.num_available_pages
        if num_available >= len(self.running) + self._step_tokens // size:
            return False
        num_needed = 0
        for sequence in self.running:
            end = min(len(sequence.tokens), sequence.num_computed + self._step_tokens)
            num_needed += max(0, -(-end // size) - sequence.pages.num_pages)
        return num_needed > num_available

    def check_invariants(self) -> None:
        """Raise ``RuntimeError`` if the queue, the running sequences and the cache are inconsistent."""
        self.cache.check()
        waiting = [sequence for _, _, request in self._queue for sequence in request.waiting]
        if self._queue != sorted(self._queue) or not all(request.waiting for _, _, request in self._queue):
            raise RuntimeError("the queue is not sorted, or contains a request without waiting sequences")
        if len(waiting) != self.num_waiting or any(sequence.table is not None for sequence in waiting):
            raise RuntimeError("num_waiting is wrong, or a waiting sequence has a page table")
        if self.loader is not None:
            self.loader.check([sequence.loads for sequence in waiting])
        if len(self.running) > self._max_running or self.cache.num_tables != len(self.running):
            raise RuntimeError("the open page tables are not those of the running sequences")
        for sequence in self.running:
            table = sequence.pages
            cached = list(itertools.chain.from_iterable(node.key for node in self.cache.cached_path(table)))
            if len(cached) > sequence.num_computed or cached != sequence.cache_keys[: len(cached)]:
                raise RuntimeError(f"row {table.row} published other tokens than it has computed")
            if sequence.num_computed > table.num_pages * self.cache.page_size:
                raise RuntimeError(f"row {table.row} has computed more tokens than its pages hold")

    # Running sequences.

    def _continue_running(self, schedule: Schedule, running: abc.Iterable[Sequence]) -> tuple[int, bool]:
        """Schedule running sequences; return the tokens left of the step, and whether a sequence was preempted."""
        decoding, prompts = self._split_by_work(running)
        has_preempted = False
        for sequence in decoding:
            table = sequence.table
            if table is not None and sequence.drops is not None:
                self._drop_due_pages(sequence, sequence.drops)
            if table is not None and len(sequence.tokens) > table.num_pages * self.cache.page_size:
                has_preempted |= self._make_room(sequence, len(sequence.tokens))
        scheduled = [(sequence, 1) for sequence in decoding]
        num_tokens = self._step_tokens - len(scheduled)
        for sequence in prompts:
            count = min(len(sequence.tokens) - sequence.num_computed, num_tokens)
            if count > 0:
                if sequence.table is not None and sequence.drops is not None:
                    self._drop_due_pages(sequence, sequence.drops)
                    count = min(count, sequence.drops.count_until_next(sequence.num_computed))
                has_preempted |= self._make_room(sequence, sequence.num_computed + count)
                if sequence.table is not None:
                    scheduled.append((sequence, count))
                    num_tokens -= count
        if has_preempted:
            scheduled = [(sequence, count) for sequence, count in scheduled if sequence.table is not None]
        schedule.scheduled = scheduled
        return num_tokens, has_preempted

    def _split_by_work(self, running: abc.Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return the sequences that decode in this step, and all running prompts by rank.

        A quarter of the step is kept for prompts, running or waiting, so some decoding sequences may have to pause.
        """
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in running:
            num_left = len(sequence.tokens) - sequence.num_computed
            if num_left:  # else all is launched, and the sequence ends when the results are read
                (prompts if num_left > 1 else decoding).append(sequence)
        has_prompts = prompts or (self._queue and len(self.running) < self._max_running)
        max_decoding = max(1, self._step_tokens - (max(1, self._step_tokens // 4) if has_prompts else 0))
        if len(decoding) > max_decoding:
            decoding = sorted(decoding, key=_get_rank)[:max_decoding]
        return decoding, sorted(prompts, key=_get_rank)

    def _drop_due_pages(self, sequence: Sequence, drops: PageDrops) -> None:
        """Drop pages of a sequence that has as many tokens as it may keep."""
        places = drops.take_due(sequence.tokens, sequence.num_computed)
        if places:
            self.cache.evict_pages(sequence.pages, places, drops.first_page)
            self.num_dropped_tokens += len(places) * self.cache.page_size

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve pages for ``num_tokens`` tokens; return True if sequences were preempted, perhaps this one, too."""
        has_preempted = False
        while sequence.table is not None and not self.cache.reserve(sequence.table, num_tokens):
            self._preempt()
            has_preempted = True
        return has_preempted

    def _preempt(self) -> None:
        """Preempt one sequence: lowest priority first, then the cheapest to recompute, then the youngest."""
        head = min(self.running, key=_get_rank)
        others = [sequence for sequence in self.running if sequence is not head]
        if not others:
            raise RuntimeError("a sequence that runs alone does not fit into the pool")
        self._send_back(self._choose_victim(others))

    def _choose_victim(self, running: abc.Iterable[Sequence]) -> Sequence:
        return min(running, key=lambda other: (other.request.priority, self._count_lost_pages(other), -other.order))

    def _preempt_background(self) -> bool:
        """Preempt a sequence of negative priority for one that waits; return False if none runs."""
        background = [sequence for sequence in self.running if sequence.request.priority < 0]
        if background:
            self._send_back(self._choose_victim(background))
        return bool(background)

    def _send_back(self, victim: Sequence) -> None:
        self.finish(victim, has_ended=False)
        if self.loader is not None:
            self._claim(victim)
        self._set_waiting(victim.request, sorted([*victim.request.waiting, victim], key=_ARRIVAL_ORDER))
        self.num_preemptions += 1

    def _claim(self, victim: Sequence) -> None:
        """Let the lower tier take the pages of a preempted sequence, if they are evicted before it runs again."""
        victim.claim = f"{_PREEMPTED}{victim.order}"
        match = self.cache.tree.match(victim.request.namespace, victim.cache_keys, victim.num_computed)
        self.cache.pins.claim(victim.claim, match.nodes)
        if match.partial_page is not None:
            self.cache.pins.claim(victim.claim, [match.partial_page])

    def _count_lost_pages(self, sequence: Sequence) -> int:
        """Return how many pages only this sequence and the tree hold: memory is short, so they would be evicted.

        What it has dropped is computed again as well.
        """
        holders, nodes, num_lost = self.cache.pool.ref_counts, self.cache.tree.nodes, sequence.pages.num_dropped_pages
        for page in reversed(sequence.pages.pages):
            if holders[page] > (2 if page in nodes else 1):
                break
            num_lost += 1
        return num_lost

    # Waiting sequences.

    def _admit(self, schedule: Schedule, num_tokens: int, *, is_foreground: bool) -> None:
        """Start waiting sequences while there are tokens, rows and memory left."""
        admission = _Admission(num_tokens, is_foreground=is_foreground)
        for sequence in self.running:
            if not is_foreground or sequence.request.priority >= 0:  # what pauses computes no page to wait for
                self._register_pending_page(sequence, admission)
        for request in self._rank_requests():
            if is_foreground and request.priority < 0:
                break
            if not self._admit_request(request, admission, schedule):
                break

    def _admit_request(self, request: Request, admission: _Admission, schedule: Schedule) -> bool:
        """Start sequences of one request; return False if nothing more can start in this step."""
        postponed: list[Sequence] = []
        num_started, can_continue = 0, True
        for sequence in request.waiting:
            if admission.num_tokens <= 0 or admission.num_candidates == 0 or not self._has_row(admission):
                can_continue = False
                break
            if len(postponed) == _MAX_POSTPONED:
                break
            match, retained = self._match(sequence), self._find_retained(sequence)
            if retained is None and self._is_prefix_in_progress(sequence, match, admission):
                postponed.append(sequence)
                admission.num_candidates -= 1
                continue
            if retained is None and self._must_wait_for_load(sequence, match):
                postponed.append(sequence)
                admission.num_candidates -= 1
                continue
            found = self._find_room(sequence, match, retained, admission)
            if found is None:
                can_continue = False
                break
            match = self._restore(sequence, found)
            if retained is None and self._must_wait_for_load(sequence, match):  # for the next part of a long prefix
                postponed.append(sequence)
                admission.num_candidates -= 1
                continue
            num_started += 1
            admission.num_tokens -= self._start(
                sequence, match, retained=retained, num_tokens=admission.num_tokens, schedule=schedule
            )
            if sequence.table is not None:
                self._register_pending_page(sequence, admission)
        self._set_waiting(request, postponed + request.waiting[num_started + len(postponed) :])
        return can_continue

    def _has_row(self, admission: _Admission) -> bool:
        """Return True if another sequence may run, perhaps in the place of one that yields."""
        return len(self.running) < self._max_running or (admission.is_foreground and self._preempt_background())

    def _find_room(
        self, sequence: Sequence, match: Match, retained: RetainedTable | None, admission: _Admission
    ) -> Match | None:
        """Return the match of a waiting sequence for which there is memory, perhaps that of some that yield."""
        # One page in reserve for each running sequence: without it, the new one would soon be preempted.
        while self.running and not self._has_room(
            sequence, match, retained, admission.reserved_pages + len(self.running)
        ):
            if not admission.is_foreground or not self._preempt_background():
                return None
            match = self._match(sequence)
        return match

    def _has_room(self, sequence: Sequence, match: Match, retained: RetainedTable | None, reserve: int) -> bool:
        """Return True if a waiting sequence can start and leave the reserved pages."""
        if retained is not None:
            num_new = len(sequence.tokens) + 1 - len(retained.tokens) + self.cache.page_size
            return self.cache.has_room(Match(), num_new, reserve, retained)
        num_tokens = len(sequence.tokens) if sequence.drops is None else sequence.drops.bound_kept(sequence.tokens)
        return self.cache.has_room(match, num_tokens + 1, reserve)

    def _find_retained(self, sequence: Sequence) -> RetainedTable | None:
        """Return the table that a branch with dropped pages left, if this sequence goes on with it."""
        if sequence.drops is None or not len(self.cache.retained):
            return None
        return self.cache.retained.find(sequence.scope, sequence.cache_keys, sequence.max_known)

    def _reopen(self, sequence: Sequence, retained: RetainedTable) -> PageTable | None:
        """Open a table on the one that a branch with dropped pages left; ``None`` without memory."""
        is_shared = len(retained.tokens) <= sequence.num_inherited
        table = self.cache.reopen_table(retained, sequence.request.namespace, is_shared=is_shared)
        if table is not None:
            sequence.drops = retained.drops.fork() if is_shared else retained.drops
        return table

    def _must_wait_for_load(self, sequence: Sequence, match: Match) -> bool:
        """Return True if the prefix of a sequence goes on in the lower tier and is being loaded."""
        if self.loader is None:
            return False
        namespace = sequence.request.namespace
        return self.loader.must_wait(
            sequence.loads, match, namespace=namespace, tokens=sequence.cache_keys, limit=sequence.max_cached
        )

    def _restore(self, sequence: Sequence, match: Match) -> Match:
        """Put what was loaded for a sequence into the cache; return its match then."""
        if self.loader is None or not self.loader.restore(sequence.loads, match, sequence.request.namespace):
            return match
        before = match.num_tokens
        match = self._match(sequence)
        self.loader.tier.stats.tokens_loaded += max(0, match.num_tokens - before)
        return match

    def _end_waiting(self, sequence: Sequence) -> None:
        """Forget the load and the claim of a sequence that waits no more."""
        if self.loader is not None:
            self.loader.forget(sequence.loads)
        if sequence.claim is not None:
            self.cache.pins.release(sequence.claim)
            sequence.claim = None

    def _rank_requests(self) -> list[Request]:
        """Return the requests in the queue's window in the order in which they should start."""

        def rank(entry: tuple[int, int, Request]) -> tuple[int, bool, float, int, int]:
            negated_priority, order, request = entry
            if self._num_admissions - request.admissions_at_arrival >= MAX_BYPASSES:
                return negated_priority, False, 0.0, 0, order
            return negated_priority, True, request.deadline, -self._match(request.waiting[0]).num_tokens, order

        window = self._queue[:QUEUE_WINDOW]
        return [request for _, _, request in (sorted(window, key=rank) if len(window) > 1 else window)]

    def _match(self, sequence: Sequence) -> Match:
        """Return the cached prefix of a waiting sequence, continuing the previous lookup."""
        sequence.match = self.cache.match_prefix(
            sequence.cache_keys, sequence.max_cached, sequence.request.namespace, sequence.match
        )
        return sequence.match

    def _register_pending_page(self, sequence: Sequence, admission: _Admission) -> None:
        """Register the page that a running sequence computes next, and the pages that its tokens still need."""
        size, table = self.cache.page_size, sequence.pages
        if sequence.num_computed < sequence.num_prefix_tokens and not table.num_dropped_pages:
            start = table.num_shared_pages * size
            key = tuple(sequence.cache_keys[start : min(start + size, sequence.num_prefix_tokens)])
            admission.pending_pages.setdefault((table.last_node or table.namespace, key), sequence)
        if len(sequence.tokens) - sequence.num_computed > 1:
            num_pages = table.num_pages
            num_tokens = len(sequence.tokens)
            if sequence.drops is not None:
                num_pages, num_tokens = len(table.pages), sequence.drops.bound_kept(sequence.tokens)
            admission.reserved_pages += max(0, -(-(num_tokens + 1) // size) - num_pages)

    def _is_prefix_in_progress(self, sequence: Sequence, match: Match, admission: _Admission) -> bool:
        """Return True if another sequence computes the next page of this one, and shares enough to be worth waiting."""
        if not admission.pending_pages:
            return False
        size, tokens = self.cache.page_size, sequence.cache_keys
        start = len(match.path) * size
        node = match.path[-1] if match.path else sequence.request.namespace
        other = admission.pending_pages.get((node, tuple(tokens[start : start + size])))
        if other is None:
            return False
        num_shared = _common_prefix(tokens, other.cache_keys, start, min(sequence.max_cached, other.num_prefix_tokens))
        return num_shared - match.num_tokens >= max(1, size // 2)

    def _start(
        self,
        sequence: Sequence,
        match: Match,
        retained: RetainedTable | None,
        num_tokens: int,
        schedule: Schedule,
    ) -> int:
        """Start a waiting sequence with at most ``num_tokens`` tokens; return how many are scheduled."""
        table = None if retained is None else self._reopen(sequence, retained)
        if table is None:
            if retained is not None:  # making room may have changed the tree
                match = self._match(sequence)
            table = self.cache.open_table(match, sequence.request.namespace, wanted=(sequence.max_cached,))
            if sequence.drops is not None:
                sequence.drops.reset()
        sequence.match = None
        self._end_waiting(sequence)
        num_needed = len(sequence.tokens) - table.num_cached_tokens
        if sequence.num_cached is None:
            sequence.num_cached = table.num_cached_tokens
            if isinstance(sequence, ScoreSequence) and num_needed > sequence.max_compute:
                self.cache.close_table(table)
                schedule.over_budget.append(sequence)
                return 0
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += table.num_cached_tokens
        sequence.table, sequence.num_computed = table, table.num_cached_tokens
        self.running[sequence] = None
        self._num_admissions += 1
        count = min(num_needed, num_tokens)
        if sequence.drops is not None:
            self._drop_due_pages(sequence, sequence.drops)
            count = min(count, sequence.drops.count_until_next(sequence.num_computed))
        if not self.cache.reserve(table, sequence.num_computed + count):
            raise RuntimeError("a sequence was admitted that does not fit")
        schedule.scheduled.append((sequence, count))
        return count

    def _set_waiting(self, request: Request, waiting: list[Sequence]) -> None:
        """Replace the waiting sequences of a request, and queue or dequeue the request accordingly."""
        if waiting and not request.waiting:
            insort(self._queue, _queue_entry(request))
        elif request.waiting and not waiting:
            del self._queue[bisect_left(self._queue, _queue_entry(request))]
        self.num_waiting += len(waiting) - len(request.waiting)
        request.waiting = waiting


def _queue_entry(request: Request) -> tuple[int, int, Request]:
    return -request.priority, request.order, request


def _get_rank(sequence: Sequence) -> tuple[int, int]:
    return -sequence.request.priority, sequence.order


def _common_prefix(left: abc.Sequence[int], right: abc.Sequence[int], start: int, limit: int) -> int:
    """Return how many of the first ``limit`` tokens are equal; the first ``start`` are known to be."""
    if left[start:limit] == right[start:limit]:
        return limit
    return next(index for index in range(start, limit) if left[index] != right[index])
