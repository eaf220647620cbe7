"""What the engines serve, remembered for a moment, so that one that is slow or away never slows the API."""

from __future__ import annotations

import asyncio
import time

from engine.client.health import Health, Standing
from engine.protocol.types import EngineClient, EngineError, EngineUnavailable, ModelInfo

FRESH_SECONDS = 5.0
PATIENCE_SECONDS = 0.8


class Catalog:
    """Asks the engines for their models. ``health`` is what the client ``engine`` knows of each of them."""

    def __init__(self, engine: EngineClient, health: Health) -> None:
        self._engine = engine
        self._health = health
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._answer: list[ModelInfo] | EngineError = EngineUnavailable("not asked yet")

    async def models(self) -> list[ModelInfo]:
        """Raises ``EngineError`` when no engine answers in time."""
        if time.monotonic() - self._asked_at > FRESH_SECONDS:
            await self.refresh()
        if isinstance(self._answer, EngineError):
            raise self._answer
        return self._answer

    def engines(self) -> list[Standing]:
        """How each of them is."""
        return self._health.standings()

    async def answers(self) -> bool:
        """Ask now, and return whether jobs find an engine."""
        await self.refresh()
        return not isinstance(self._answer, EngineError)

    async def refresh(self) -> None:
        """Ask now. Those who come at the same time share one question, and its answer if they go before it comes."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                self._answer = await self._engine.models()
        except TimeoutError:
            self._answer = EngineUnavailable(f"the engine could not be reached within {PATIENCE_SECONDS} s")
        except EngineError as error:
            self._answer = error
        self._asked_at = time.monotonic()
