"""Engine client for evaluations that gets the same results with fewer requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.protocol.forwarding import ForwardingEngine
from engine.protocol.types import EngineClient, Events, GenerateRequest, ModelInfo, ScoreRequest, ScoreResult


class LeaselessEngine(ForwardingEngine):
    """Takes no cache leases and lists the models once.

    Releasing leases is a third of a tree search's requests. Jobs of an evaluation are short and few at a time, so their
    cache entries need no protection from eviction.
    """

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(engine)
        self._models: list[ModelInfo] | None = None

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        return super().generate(replace(request, lease=None), stream=stream)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        return await super().score(replace(request, lease=None))

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:  # noqa: ARG002
        return None

    async def models(self) -> list[ModelInfo]:
        if self._models is None:
            self._models = await super().models()
        return self._models
