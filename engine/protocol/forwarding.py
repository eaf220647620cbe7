"""Base class of engines that wrap another one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from engine.protocol.types import Completion, Delta, EngineClient, GenerateRequest, ModelInfo, ScoreRequest, ScoreResult


class ForwardingEngine:
    """``EngineClient`` that forwards every call to ``engine``. Subclasses override the calls that they change."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        return self._engine.generate(request, stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        return await self._engine.score(request)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        await self._engine.release(lease, tokens)

    async def tokenize(
        self,
        model: str,
        text: str | Sequence[dict[str, str]],
        *,
        special: bool = True,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        return await self._engine.tokenize(model, text, special=special, generation_prompt=generation_prompt)

    async def models(self) -> list[ModelInfo]:
        return await self._engine.models()

    async def clear_cache(self) -> None:
        await self._engine.clear_cache()

    async def close(self) -> None:
        await self._engine.close()
