"""Sources of token grants, for jobs that share a budget."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from reasoner.budget.allocator import MAX_ACTIVE_JOBS, TokenPool, TokenRequest


class JobParked(Exception):
    """The job has to wait for a grant; once it has one, it can be run again from its journal."""

    def __init__(self, request: TokenRequest) -> None:
        super().__init__(f"waits for {request.tokens} tokens")
        self.request = request


class GrantSource(Protocol):
    """One job's access to a shared budget."""

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        """Return tokens beyond the ``granted`` ones that the job has used; 0 if there will be no more.

        Raises ``JobParked`` if the job must not wait for the decision.
        """
        ...


class StoredGrants:
    """Grants that a store has decided so far; the job is parked if it needs more."""

    def __init__(self, granted: int, closed: bool) -> None:
        self._granted = granted
        self._closed = closed

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        if granted >= self._granted and not self._closed:
            raise JobParked(request)
        return self._granted - granted


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
