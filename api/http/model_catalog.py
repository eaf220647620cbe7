"""Models that the engines serve, cached briefly so that a slow or absent engine never slows the API."""

from __future__ import annotations

import asyncio
import time

from engine.client.health import Health, ReplicaHealth
from engine.protocol.types import EngineClient, EngineError, EngineUnavailable, ModelInfo

CACHE_SECONDS = 5.0
TIMEOUT_SECONDS = 0.8


class ModelCatalog:
    """Lists the models of the engines. ``health`` is the health record of the client ``engine``."""

    def __init__(self, engine: EngineClient, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._refreshed_at = float("-inf")
        self._refresh_task: asyncio.Task[None] | None = None
        self._result: list[ModelInfo] | EngineError = EngineUnavailable("the engine was not queried yet")

    async def models(self) -> list[ModelInfo]:
        """Return the served models. Raises ``EngineError`` when no engine answers in time."""
        if time.monotonic() - self._refreshed_at > CACHE_SECONDS:
            await self.refresh()
        if isinstance(self._result, EngineError):
            raise self._result
        return self._result

    def engines(self) -> list[ReplicaHealth]:
        """Return the health of each engine."""
        return self._health.snapshot()

    async def is_engine_available(self) -> bool:
        """Query the engines now, and return True if one answers."""
        await self.refresh()
        return not isinstance(self._result, EngineError)

    async def refresh(self) -> None:
        """Query the engines now. Concurrent callers share one query, which goes on when a caller is cancelled."""
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.create_task(self._query())
        await asyncio.shield(self._refresh_task)

    async def _query(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                self._result = await self._engine.models()
        except TimeoutError:
            self._result = EngineUnavailable(f"the engine did not answer within {TIMEOUT_SECONDS} s")
        except EngineError as error:
            self._result = error
        self._refreshed_at = time.monotonic()
