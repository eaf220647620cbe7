"""Token grants: how a job gets tokens out of a budget that it shares with others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from reasoner.budget.allocator import MAX_ACTIVE_JOBS, TokenPool, TokenRequest


class JobParked(Exception):
    """The job has to wait for a grant. It can be run again from its journal when it has got one."""

    def __init__(self, request: TokenRequest) -> None:
        super().__init__(f"waits for {request.tokens} tokens")
        self.request = request


class GrantSource(Protocol):
    """One job's access to the shared budget."""

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        """Tokens beyond the ``granted`` ones that the job knows of; 0 when there will be no more.

        Raises ``JobParked`` where the job must not wait for the answer.
        """
        ...


class StoredGrants:
    """What a job has been granted by now; for more it has to be parked."""

    def __init__(self, granted: int, closed: bool) -> None:
        self._granted = granted
        self._closed = closed

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        """See ``GrantSource``."""
        if granted >= self._granted and not self._closed:
            raise JobParked(request)
        return self._granted - granted


class SharedBudget:
    """The budget of a batch whose jobs run in one process, on one event loop: they wait where they are."""

    def __init__(self, budget: int, jobs: Sequence[str], width: int = MAX_ACTIVE_JOBS) -> None:
        self.pool = TokenPool(budget, jobs, width)
        self._waiting: dict[str, asyncio.Future[int]] = {}

    def member(self, job: str) -> GrantSource:
        """The grant_source of one of the jobs."""
        return _Member(self, job)

    async def request(self, job: str, request: TokenRequest) -> int:
        """Waits until the job's turn has come; 0 when it gets no more."""
        self._waiting[job] = asyncio.get_running_loop().create_future()
        self._answer(self.pool.request(job, request))
        return await self._waiting[job]

    def end(self, job: str, spent: int) -> None:
        """The job has ended, however that came."""
        self._waiting.pop(job, None)
        self._answer(self.pool.end(job, spent))

    def _answer(self, dealt: dict[str, int]) -> None:
        for job, tokens in dealt.items():
            self._waiting[job].set_result(tokens)


class _Member:
    def __init__(self, shared: SharedBudget, job: str) -> None:
        self._shared = shared
        self._job = job

    async def request_tokens(self, granted: int, request: TokenRequest) -> int:
        """See ``GrantSource``."""
        known = self._shared.pool.granted[self._job]
        return known - granted if known > granted else await self._shared.request(self._job, request)
