"""The engine of an evaluation: the same answers with fewer requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from engine.types import Completion, Delta, EngineClient, GenerateRequest, ModelInfo, ScoreRequest, ScoreResult


class LeanEngine:
    """Asks for no leases, whose ends are a third of the requests of a tree search: jobs of an evaluation are short and
    few at a time, so nothing has to be kept from eviction. Asks once what is served."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._models: list[ModelInfo] | None = None

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        return self._engine.generate(replace(request, lease=None), stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        return await self._engine.score(replace(request, lease=None))

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:  # noqa: ARG002
        return None

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
        if self._models is None:
            self._models = await self._engine.models()
        return self._models

    async def clear_cache(self) -> None:
        await self._engine.clear_cache()

    async def close(self) -> None:
        await self._engine.close()
