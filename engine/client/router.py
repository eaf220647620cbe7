"""Several engines as one: each model is asked where it is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from engine.protocol.types import (
    Completion,
    Delta,
    EngineClient,
    EngineError,
    GenerateRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
)


class RoutedEngine:
    """``EngineClient``. Models that are not named elsewhere are the main engine's."""

    def __init__(
        self,
        main: EngineClient,
        elsewhere: Mapping[str, EngineClient],
        notes: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """``elsewhere``: the engine of each model that has one of its own, by the name that it serves it under.
        ``notes``: what the configuration says of models, in place of their checkpoints' own ``ModelInfo.extra``."""
        self._main = main
        self._elsewhere = dict(elsewhere)
        self._notes = dict(notes or {})

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        """See ``EngineClient``."""
        return self._of(request.model).generate(request, stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """See ``EngineClient``."""
        return await self._of(request.model).score(request)

    async def abort(self, request_id: str) -> None:
        """See ``EngineClient``."""
        await asyncio.gather(*(engine.abort(request_id) for engine in self._all))

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """See ``EngineClient``."""
        await asyncio.gather(*(engine.release(lease, tokens) for engine in self._all))

    async def tokenize(
        self,
        model: str,
        text: str | Sequence[dict[str, str]],
        *,
        special: bool = True,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """See ``EngineClient``."""
        return await self._of(model).tokenize(model, text, special=special, generation_prompt=generation_prompt)

    async def models(self) -> list[ModelInfo]:
        """See ``EngineClient``. Raises ``EngineError`` when an engine does not serve the model that it is named for."""
        listed = await asyncio.gather(*(engine.models() for engine in self._all))
        models = [info for info in listed[0] if info.id not in self._elsewhere]
        for name, served in zip(self._elsewhere, listed[1:], strict=True):
            found = [info for info in served if info.id == name]
            if not found:
                others = ", ".join(info.id for info in served) or "nothing"
                raise EngineError(f"the server that is configured for model {name!r} does not serve it, but {others}")
            models += found
        return [replace(info, extra={**info.extra, **self._notes.get(info.id, {})}) for info in models]

    async def clear_cache(self) -> None:
        """See ``EngineClient``."""
        await asyncio.gather(*(engine.clear_cache() for engine in self._all))

    async def close(self) -> None:
        """See ``EngineClient``."""
        await asyncio.gather(*(engine.close() for engine in self._all))

    @property
    def _all(self) -> list[EngineClient]:
        return [self._main, *self._elsewhere.values()]

    def _of(self, model: str) -> EngineClient:
        return self._elsewhere.get(model, self._main)
