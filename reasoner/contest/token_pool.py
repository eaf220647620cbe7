"""The tokens that the problems of a contest share: who gets the next slice.

Each problem first gets the same initial grant. A search that has used up its grants asks for about one solution more
and says by how much it expects that to raise the probability of a right answer; the largest gain per token is granted.
The rule is that of batches (``reasoner.budget.allocator``), for searches of one process that wait where they are.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from reasoner.budget.allocator import MAX_ACTIVE_JOBS, TokenRequest, initial_grant

LEAST_GAIN = 0.001
"""Expected gain below which a problem gets no more: its answer is certain, or nothing more is to be hoped for."""


class TokenPool:
    """Grants of one contest: never more than its tokens in all, those of an earlier attempt included."""

    def __init__(
        self, tokens: int, num_problems: int, taken: Mapping[str, int], max_active: int = MAX_ACTIVE_JOBS
    ) -> None:
        """``taken``: for each problem the tokens that it spent, or while it is not solved was granted, so far."""
        self.left = tokens - sum(taken.values())
        self._taken = dict(taken)
        self._initial = initial_grant(tokens, num_problems)
        self._max_active = max_active
        self._active: set[str] = set()
        self._arrivals = itertools.count()
        self._waiting: list[tuple[float, int, str, TokenRequest, asyncio.Future[int]]] = []
        self._is_closed = False

    def open_share(self, problem: str) -> Share:
        """Return the problem's access to the pool. One that goes on with its grants spends them at once."""
        if self._taken.get(problem, 0) > 0:
            self._active.add(problem)
        return Share(self, problem)

    async def request(self, problem: str, granted: int, request: TokenRequest) -> int:
        """Wait for a grant and return its tokens; 0 if there will be no more, or if they would gain nothing.

        ``granted``: the tokens that the search has had so far. First grants come before all others.
        """
        self._active.discard(problem)
        if granted > 0 and request.gain < LEAST_GAIN:
            self._decide()
            return 0
        decided: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        rank = -float("inf") if granted == 0 else -request.rate
        heapq.heappush(self._waiting, (rank, next(self._arrivals), problem, request, decided))
        self._decide()
        return await decided

    def end(self, problem: str, spent: int) -> None:
        """Take back what an ended search was granted and has not spent."""
        self.left += self._taken.get(problem, 0) - spent
        self._taken[problem] = spent
        self._active.discard(problem)
        self._decide()

    def close(self) -> None:
        """Refuse all grants from now on, since the time is over."""
        self._is_closed = True
        self._decide()

    def _decide(self) -> None:
        """Grant slices while there are tokens and searches may be active; refuse all once nothing can come back."""
        while self._waiting and self.left > 0 and len(self._active) < self._max_active and not self._is_closed:
            rank, _, problem, request, decided = heapq.heappop(self._waiting)
            if decided.done():  # its search was cancelled
                continue
            tokens = min(self.left, self._initial if rank == -float("inf") else request.tokens)
            self.left -= tokens
            self._taken[problem] = self._taken.get(problem, 0) + tokens
            self._active.add(problem)
            decided.set_result(tokens)
        if self._is_closed or (self.left <= 0 and not self._active):
            for *_, decided in self._waiting:
                if not decided.done():
                    decided.set_result(0)
            self._waiting.clear()


@dataclass(frozen=True, slots=True)
class Share:
    """The grants of one problem: the ``GrantSource`` of its search."""

    pool: TokenPool
    problem: str

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        return await self.pool.request(self.problem, granted, request)
