"""Token grants: how a job gets tokens out of a budget that it shares with others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from reasoner.budget.allocator import WIDTH, Ask, Pool


class Parked(Exception):
    """The job has to wait for a grant. It can be run again from its journal when it has got one."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(f"waits for {ask.tokens} tokens")
        self.ask = ask


class Allowance(Protocol):
    """One job's access to the shared budget."""

    async def more(self, granted: int, ask: Ask) -> int:
        """Tokens beyond the ``granted`` ones that the job knows of; 0 when there will be no more.

        Raises ``Parked`` where the job must not wait for the answer.
        """
        ...


class Granted:
    """What a job has been granted by now; for more it has to be parked."""

    def __init__(self, granted: int, closed: bool) -> None:
        self._granted = granted
        self._closed = closed

    async def more(self, granted: int, ask: Ask) -> int:
        """See ``Allowance``."""
        if granted >= self._granted and not self._closed:
            raise Parked(ask)
        return self._granted - granted


class SharedBudget:
    """The budget of a batch whose jobs run in one process, on one event loop: they wait where they are."""

    def __init__(self, budget: int, jobs: Sequence[str], width: int = WIDTH) -> None:
        self.pool = Pool(budget, jobs, width)
        self._waiting: dict[str, asyncio.Future[int]] = {}

    def member(self, job: str) -> Allowance:
        """The allowance of one of the jobs."""
        return _Member(self, job)

    async def ask(self, job: str, ask: Ask) -> int:
        """Waits until the job's turn has come; 0 when it gets no more."""
        self._waiting[job] = asyncio.get_running_loop().create_future()
        self._answer(self.pool.ask(job, ask))
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

    async def more(self, granted: int, ask: Ask) -> int:
        """See ``Allowance``."""
        known = self._shared.pool.granted[self._job]
        return known - granted if known > granted else await self._shared.ask(self._job, ask)
