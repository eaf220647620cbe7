"""Mathematical equality of two answers, decided by math-verify in a worker process that is killed on timeout.

A comparison that times out, or for which the job has no time left, counts as "not equal". Since this depends on the
clock, each result is recorded in the job's journal before it is used, so that a replay decides the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

from reasoner.answers import plain
from reasoner.answers.canonical import canonicalize
from reasoner.answers.spec import Compare
from reasoner.deadline import SecondsLeft, run_within, unlimited
from reasoner.subprocess_pool import WorkerPool, keep_workers_alive

POOL = WorkerPool("reasoner.answers.equivalence_worker")
CPU_SECONDS = 5.0
"""Maximum processor time of one comparison."""
MAX_LATE = 6
"""Maximum number of timeouts in one job. After that, answers with different canonical forms count as different."""
MAX_QUESTIONS = 4096
"""Maximum number of comparisons in one job. After that, answers with different canonical forms count as different."""
MAX_CHARS = 1000
"""Maximum length of an answer; longer ones are compared as text."""

Settle = Callable[[str, Callable[[], Awaitable[str | None]]], Awaitable[str | None]]
"""Function ``settle(key, find)`` that returns the recorded result for ``key``, or calls ``find`` and records it."""


async def _ask_anew(key: str, find: Callable[[], Awaitable[str | None]]) -> str | None:  # noqa: ARG001
    return await find()


class Equivalence:
    """Compares canonical answers, one at a time. As an async context manager it keeps its worker processes alive."""

    def __init__(self, settle: Settle = _ask_anew, seconds_left: SecondsLeft = unlimited) -> None:
        self._settle = settle
        self._seconds_left = seconds_left
        self._kept = ExitStack()
        self._known: dict[frozenset[str], bool] = {}
        self._settled = 0
        self._questions = 0
        self._late = 0

    def settled_by(self, settle: Settle) -> Equivalence:
        """Return a comparer with the same time limit that records its results with ``settle``."""
        return Equivalence(settle, self._seconds_left)

    async def __aenter__(self) -> Equivalence:
        self._kept.enter_context(keep_workers_alive())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._kept.close()

    async def equal(self, a: str, b: str) -> bool:
        return await self.representative(a, [b]) == b

    async def are_same(self, answer: str, other: str, compare: Compare = "math") -> bool:
        """Return True if two answers are equal as in a vote; they need not be canonical."""
        a, b = canonicalize(answer, compare), canonicalize(other, compare)
        return await self.equal(a, b) if compare == "math" else a == b

    async def representative(self, answer: str, others: Sequence[str]) -> str:
        """Return the first of ``others`` that is equivalent to ``answer``, or ``answer`` itself if there is none."""
        for index, other in enumerate(others):
            same = self._at_once(answer, other)
            if same is None:
                return await self._find_representative(answer, others[index:])
            if same:
                return other
        return answer

    async def _find_representative(self, answer: str, others: Sequence[str]) -> str:
        self._settled += 1
        same = await self._settle(f"same:{self._settled}", lambda: self._first_equal(answer, others))
        for other in others:
            self._known[frozenset((answer, other))] = other == same
            if other == same:
                return other
        return answer

    async def _first_equal(self, answer: str, others: Sequence[str]) -> str | None:
        for other in others:
            same = self._at_once(answer, other)
            if same or (same is None and await self._ask_worker(answer, other)):
                return other
        return None

    def _at_once(self, a: str, b: str) -> bool | None:
        """Compare two answers without algebra; ``None`` if that is inconclusive."""
        if a == b:
            return True
        if max(len(a), len(b)) > MAX_CHARS:
            return False
        if (same := plain.decide_equal(a, b)) is not None:
            return same
        return self._known.get(frozenset((a, b)))

    async def _ask_worker(self, a: str, b: str) -> bool:
        if self._late >= MAX_LATE or self._questions >= MAX_QUESTIONS:
            return False
        self._questions += 1
        answer = await run_within(self._seconds_left(), lambda: POOL.call([a, b], CPU_SECONDS))
        self._late += answer is None
        return answer is True
