"""The job's pin on the engine's cache, which keeps the job's prefixes until it is over.

Errors of the pin never fail a job. If a release does not reach the engine, the pin expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from engine.protocol.types import EngineClient, EngineError, EngineUnavailable, Tokens
from reasoner.jobs.journal import LeaseLost

RELEASE_TIMEOUT_SECONDS = 2.0
"""Longest wait for a release at the end of a job."""

_GOES_ON = (EngineUnavailable, LeaseLost, asyncio.CancelledError)
"""Exceptions that do not end the job: another attempt continues it and needs the cached prefixes."""


class PrefixPin:
    """Async context manager around the job's work; ``key`` goes into every request."""

    def __init__(self, engine: EngineClient, key: str) -> None:
        self.key = key
        self._engine = engine
        self._pruning: set[asyncio.Task[None]] = set()

    def prune(self, branches: Sequence[Tokens]) -> None:
        """Release pruned branches, each given by all its tokens, without waiting for the engine.

        These are the policy's tokens. The verifier's cached prefixes of the branches stay until the job is over: they
        are sent as text, so only the engine has their tokens.
        """
        task = asyncio.create_task(self._release(branches))
        self._pruning.add(task)
        task.add_done_callback(self._pruning.discard)

    async def __aenter__(self) -> PrefixPin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._pruning:
            task.cancel()
        if not isinstance(error, _GOES_ON):
            await self._release([None])

    async def _release(self, branches: Sequence[Tokens | None]) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_SECONDS):
                for branch in branches:
                    await self._engine.release(self.key, branch)
        except (EngineError, TimeoutError):
            return  # the pin expires
