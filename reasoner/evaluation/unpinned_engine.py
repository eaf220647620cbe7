"""Engine client for evaluations that gets the same results with fewer requests."""

from __future__ import annotations

import logging
from dataclasses import replace

from engine.protocol.dispatching import ForwardingEngine
from engine.protocol.types import (
    EngineClient,
    Events,
    GenerateRequest,
    ModelInfo,
    NotSupported,
    ScoreRequest,
    ScoreResult,
    Tokens,
)

log = logging.getLogger("reasoner.evaluation")


class UnpinnedEngine(ForwardingEngine):
    """Pins nothing and lists the models once. Goes on with a warm cache where the server cannot clear it.

    Releasing pins is a third of a tree search's requests. Jobs of an evaluation are short and few at a time, so their
    cache entries need no protection from eviction.
    """

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(engine)
        self._models: list[ModelInfo] | None = None
        self._warned = False

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        return super().generate(replace(request, pin_key=None), stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        return await super().score(replace(request, pin_key=None))

    async def release(self, pin_key: str, tokens: Tokens | None = None) -> None:  # noqa: ARG002
        return None

    async def clear_cache(self) -> None:
        try:
            await super().clear_cache()
        except NotSupported as error:  # only the seconds and the cached tokens depend on it
            if not self._warned:
                log.warning("%s: what is cached from before makes the measured seconds shorter", error)
            self._warned = True

    async def models(self) -> list[ModelInfo]:
        if self._models is None:
            self._models = await super().models()
        return self._models
