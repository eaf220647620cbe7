"""Simulation of the scheduler and the cache without a model.

Each slot holds a mark, which depends on the namespace and on every token up to its own, as real keys and values do. The
next token of a branch depends on all marks in its page table, so a page that is shared, copied or freed by mistake
changes the generated tokens. ``reference`` computes the expected ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.page_drops import PageDrops
from engine.cache.page_table import PageTable
from engine.cache.paged_kv import KVCache
from engine.protocol.types import KeyBound
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Request, Sequence

PAGE = 4
VOCABULARY = 3
"""Size of the vocabulary; small, so that branches often share tokens."""
_MODULUS = 1_000_003
"""Modulus of the marks, below which float32 is exact."""


@dataclass(frozen=True)
class Bound:
    """A bound on the keys of a branch: its tokens, and the length of the prompt that stays."""

    tokens: int
    start: int

    def create_drops(self, seed: int) -> PageDrops:
        return PageDrops(KeyBound(self.tokens, self.start, seed=seed), PAGE)


def bounded_marks(namespace: str | None, tokens: Items[int], drops: PageDrops | None) -> tuple[list[int], list[int]]:
    """Return the marks of all slots of a sequence, and those of its pages that are not dropped.

    A mark depends on the pages that were dropped before it.
    """
    found, kept, lost = [sum(map(ord, namespace or ""))], list[int](), 0
    if drops is not None:
        drops.reset()
    for position, token in enumerate(tokens):
        for place in drops.take_due(tokens, position) if drops is not None else ():
            lost += 1009 * kept.pop(place) + 17
        if position % PAGE == 0:
            kept.append(position // PAGE)
        found.append((found[-1] * 31 + token + 7 + lost) % _MODULUS)
    every = found[1:]
    return every, [mark for page in kept for mark in every[page * PAGE : (page + 1) * PAGE]]


def marks(namespace: str | None, tokens: Items[int]) -> list[int]:
    """Return the marks of the slots of a sequence that loses no page."""
    return bounded_marks(namespace, tokens, None)[0]


def slots(cache: KVCache) -> list[Tensor]:
    """Return views of the first number of every slot, ``[pages, page_size]``, and of its scale if there is one."""
    numbers = cache.data[0, 0, 0, :, :, 0]
    return [numbers] if cache.scales is None else [numbers.view(torch.int8), cache.scales[0, 0, 0]]


def write_marks(
    cache: KVCache, table: PageTable, tokens: Items[int], start: int, end: int, drops: PageDrops | None = None
) -> None:
    """Write the slots from ``start`` to ``end``. In 8 bits the scale holds the part of a mark that is too large."""
    views = slots(cache)
    for position, mark in enumerate(bounded_marks(table.namespace, tokens[:end], drops)[0][start:], start):
        place = table.pages[position // cache.page_size - table.num_dropped_pages], position % cache.page_size
        for view, part in zip(views, [mark] if len(views) == 1 else [mark % 101, mark // 101], strict=True):
            view[place] = part


def read_marks(cache: KVCache, table: PageTable, count: int) -> list[int]:
    """Return the marks of the first ``count`` tokens, without those that were dropped."""
    count -= table.num_dropped_pages * cache.page_size
    pages = torch.tensor(table.pages, dtype=torch.long)
    parts = [view[pages].flatten()[:count].long() for view in slots(cache)]
    whole: list[int] = (parts[0] if len(parts) == 1 else parts[0] + 101 * parts[1]).tolist()
    return whole


def draw(seed: int, read: Items[int]) -> int:
    """Sample the next token of a branch that attends to these marks."""
    return (sum(read) * 7 + seed * 13 + len(read)) // 5 % VOCABULARY


def reference(
    namespace: str | None, tokens: Items[int], seed: int, length: int, bound: Bound | None = None
) -> list[int]:
    """Return the whole branch as generated without a cache."""
    whole, drops = list(tokens), None if bound is None else bound.create_drops(seed)
    while len(whole) < length:
        whole.append(draw(seed, bounded_marks(namespace, whole, drops)[1]))
    return whole


@dataclass
class Branch:
    """A branch and its result."""

    namespace: str | None
    pin_key: str | None
    prompt: list[int]
    seed: int
    length: int
    bound: Bound | None = None
    tokens: list[int] = field(default_factory=list)
    """All tokens, set when the branch has ended."""
    whole: bool = False


class Bounded(Sequence):
    """A sequence whose keys may be bounded like those of a branch that generates."""

    @property
    def num_inherited(self) -> int:
        """Every other one goes on with a branch as if none else did."""
        return self.num_prefix_tokens if self.index % 2 else 0


class Simulation:
    """Runs branches to their full length, one scheduled step at a time, and checks all invariants on the way."""

    def __init__(
        self,
        *,
        pages: int = 100,
        rows: int = 8,
        step_tokens: int = 32,
        max_pinned: int = 0,
        pin_seconds: float = math.inf,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.now = 0.0
        self.cache = KVCache(
            layers=[HeadShape(1, 1, 1)],
            pages=pages,
            page_size=PAGE,
            rows=rows,
            context=pages * PAGE,
            dtype=dtype,
            max_pinned=max_pinned,
            pin_seconds=pin_seconds,
            clock=lambda: self.now,
        )
        self.scheduler = Scheduler(self.cache, max_running=rows, step_tokens=step_tokens)
        self.step_tokens = step_tokens
        self.requests: list[Request] = []
        self.branches: dict[Sequence, Branch] = {}
        self.ended: list[Branch] = []
        self.finished: list[int] = []
        """Indices of ended sequences, in the order in which they ended."""
        self.computed = 0
        self._count = 0

    def add(
        self,
        prompts: Items[list[int]],
        length: int,
        *,
        priority: int = 0,
        deadline: float = math.inf,
        namespace: str | None = None,
        pin_key: str | None = None,
        bound: Bound | None = None,
        seed: int | None = None,
    ) -> Request:
        """Submit one request with a branch for each prompt. Indices count through all requests."""
        request = Request(f"job-{self._count}", lambda _: None, deadline, False, priority, namespace, pin_key)
        for prompt in prompts:
            own_seed = self._count % 2 if seed is None else seed
            sequence = Bounded(
                request=request,
                index=self._count,
                tokens=list(prompt),
                num_prefix_tokens=len(prompt),
                drops=None if bound is None else bound.create_drops(own_seed),
            )
            request.sequences.append(sequence)
            self.branches[sequence] = Branch(namespace, pin_key, list(prompt), own_seed, length, bound)
            self._count += 1
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> list[tuple[int, int]]:
        """Run one step and return pairs (index, tokens)."""
        schedule = self.scheduler.schedule()
        total = sum(count for _, count in schedule.scheduled)
        assert 0 < total <= self.step_tokens
        self.computed += total
        for sequence, count in schedule.scheduled:
            end = sequence.num_computed + count
            write_marks(
                self.cache, sequence.pages, sequence.tokens, sequence.num_computed, end, self._create_drops(sequence)
            )
        for sequence, count in schedule.scheduled:
            self._commit(sequence, count)
        self.check()
        return [(sequence.index, count) for sequence, count in schedule.scheduled]

    def run(self) -> None:
        while self.busy:
            self.step()

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.num_waiting)

    def cancel(self, request: Request) -> None:
        self.scheduler.remove_request(request)
        for sequence in request.sequences:
            self._end(sequence, whole=False)
        request.sequences.clear()
        self.requests.remove(request)

    def check(self) -> None:
        """Check every invariant, and that every page table leads to the slots of its own tokens."""
        self.scheduler.check_invariants()
        for sequence in self.scheduler.running:
            tokens, drops = sequence.tokens[: sequence.num_computed], self._create_drops(sequence)
            _, expected = bounded_marks(sequence.request.namespace, tokens, drops)
            assert read_marks(self.cache, sequence.pages, sequence.num_computed) == expected
        if not self.busy:
            assert self.cache.count_available_pages() == self.cache.pool.size

    def _create_drops(self, sequence: Sequence) -> PageDrops | None:
        branch = self.branches[sequence]
        return None if branch.bound is None else branch.bound.create_drops(branch.seed)

    def _commit(self, sequence: Sequence, count: int) -> None:
        before, sequence.num_computed = sequence.num_computed, sequence.num_computed + count
        completes = before < sequence.num_prefix_tokens <= sequence.num_computed
        if completes or sequence.num_computed // PAGE > before // PAGE:
            self.cache.publish(sequence.pages, sequence.tokens, sequence.num_sharable, include_partial=completes)
        if sequence.num_computed < len(sequence.tokens):
            return
        branch = self.branches[sequence]
        if len(sequence.tokens) < branch.length:
            sequence.tokens.append(draw(branch.seed, read_marks(self.cache, sequence.pages, sequence.num_computed)))
        if len(sequence.tokens) >= branch.length:
            self.scheduler.finish(sequence)
            self.finished.append(sequence.index)
            self._end(sequence, whole=True)
            sequence.request.sequences.remove(sequence)
            if not sequence.request.sequences:
                self.requests.remove(sequence.request)

    def _end(self, sequence: Sequence, *, whole: bool) -> None:
        branch = self.branches.pop(sequence)
        branch.tokens, branch.whole = sequence.tokens, whole
        length = len(branch.tokens)
        assert branch.tokens == reference(branch.namespace, branch.prompt, branch.seed, length, branch.bound)
        self.ended.append(branch)
