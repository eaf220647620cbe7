"""A shared token budget of jobs that run on one event loop, by the rule of ``reasoner.budget.allocator``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from reasoner.budget.allocator import MAX_ACTIVE_JOBS, TokenRequest, initial_grant
from reasoner.budget.grant_source import GrantSource


class TokenPool:
    """The allocation of a batch's budget, by the rule that the store's scripts implement (``workers/store/lua``).

    ``request`` and ``end`` return the grants that they trigger: tokens by job, 0 for a job that gets no more.
    """

    def __init__(self, budget: int, jobs: Sequence[str], max_active: int = MAX_ACTIVE_JOBS) -> None:
        """Raises ``ValueError`` for less than one token per job."""
        if budget < len(jobs):
            raise ValueError(f"{budget} tokens are too few for {len(jobs)} jobs: give at least one token per job")
        self.granted = dict.fromkeys(jobs, initial_grant(budget, len(jobs)))
        self.unassigned = budget - sum(self.granted.values())
        self._max_active = max_active
        self._in_initial_grant = set(jobs)
        self._active: set[str] = set()
        self._waiting: dict[str, TokenRequest] = {}

    def request(self, job: str, request: TokenRequest) -> dict[str, int]:
        """Queue the request of a job that has used up its grants."""
        self._remove(job)
        self._waiting[job] = request
        return self._distribute()

    def end(self, job: str, spent: int) -> dict[str, int]:
        """Return the unspent tokens of an ended job to the pool."""
        self._remove(job)
        self.unassigned += self.granted[job] - spent
        return self._distribute()

    def _remove(self, job: str) -> None:
        self._in_initial_grant.discard(job)
        self._active.discard(job)
        self._waiting.pop(job, None)

    def _distribute(self) -> dict[str, int]:
        grants: dict[str, int] = {}
        while self._waiting and not self._in_initial_grant and len(self._active) < self._max_active:
            job, request = max(self._waiting.items(), key=lambda item: (item[1].rate, item[0]))
            if request.gain > 0 and self.unassigned == 0 and self._active:
                break  # active jobs may return tokens that reach this request
            tokens = min(request.tokens, self.unassigned) if request.gain > 0 else 0
            if tokens > 0:
                self._active.add(job)
                self.unassigned -= tokens
                self.granted[job] += tokens
            del self._waiting[job]
            grants[job] = tokens
        return grants


class SharedBudget:
    """Budget of a batch whose jobs run on one event loop: they wait for grants instead of being parked."""

    def __init__(self, budget: int, jobs: Sequence[str], max_active: int = MAX_ACTIVE_JOBS) -> None:
        self.pool = TokenPool(budget, jobs, max_active)
        self._waiting: dict[str, asyncio.Future[int]] = {}

    def member(self, job: str) -> GrantSource:
        """Return the grant source of one of the jobs."""
        return _Member(self, job)

    async def request(self, job: str, request: TokenRequest) -> int:
        """Wait for a grant and return its tokens; 0 if the job gets no more."""
        self._waiting[job] = asyncio.get_running_loop().create_future()
        self._resolve(self.pool.request(job, request))
        return await self._waiting[job]

    def end(self, job: str, spent: int) -> None:
        """Return the unspent tokens of an ended job to the pool."""
        self._waiting.pop(job, None)
        self._resolve(self.pool.end(job, spent))

    def _resolve(self, grants: dict[str, int]) -> None:
        for job, tokens in grants.items():
            self._waiting[job].set_result(tokens)


class _Member:
    def __init__(self, shared: SharedBudget, job: str) -> None:
        self._shared = shared
        self._job = job

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        total = self._shared.pool.granted[self._job]
        return total - granted if total > granted else await self._shared.request(self._job, request)
