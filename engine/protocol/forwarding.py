"""Base class of engines that wrap another one."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.types import (
    EngineClient,
    Events,
    GenerateRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
    TokenizeRequest,
    Tokens,
)


class ForwardingEngine:
    """``EngineClient`` that forwards every call to ``engine``. Subclasses override the calls that they change."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        return self._engine.generate(request, stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        return await (await self._get_engine()).score(request)

    async def abort(self, request_id: str) -> None:
        await (await self._get_engine()).abort(request_id)

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        await (await self._get_engine()).release(lease, tokens)

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        return await (await self._get_engine()).tokenize(request)

    async def models(self) -> list[ModelInfo]:
        return await (await self._get_engine()).models()

    async def clear_cache(self) -> None:
        await (await self._get_engine()).clear_cache()

    async def close(self) -> None:
        await self._engine.close()

    async def _get_engine(self) -> EngineClient:
        """Return the wrapped engine, which a subclass may choose at the first call."""
        return self._engine
