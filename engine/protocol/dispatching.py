"""Base classes of engines that have their calls answered by others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

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

ModelRequest = GenerateRequest | ScoreRequest | TokenizeRequest
"""A request to a model, which one engine answers."""

_T = TypeVar("_T")


class DispatchingEngine(EngineClient):
    """Engine that has each request answered by one of others, and tells all of them the rest.

    A method of the protocol is one line here, whichever way a subclass finds the engine.
    """

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        return await self._call_engine(request, lambda engine: engine.score(request))

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        return await self._call_engine(request, lambda engine: engine.tokenize(request))

    async def abort(self, request_id: str) -> None:
        await self._call_all(lambda engine: engine.abort(request_id))

    async def release(self, pin_key: str, tokens: Tokens | None = None) -> None:
        await self._call_all(lambda engine: engine.release(pin_key, tokens))

    async def clear_cache(self) -> None:
        await self._call_all(lambda engine: engine.clear_cache())

    @abstractmethod
    async def _call_engine(self, request: ModelRequest, call: Callable[[EngineClient], Awaitable[_T]]) -> _T:
        """Make a call to the engine for a request, and return the answer."""

    @abstractmethod
    async def _call_all(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Make a call to every engine."""


class ForwardingEngine(DispatchingEngine):
    """Engine that forwards every call to another one. Subclasses override those that they change."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        return self._engine.generate(request, stream=stream)

    async def models(self) -> list[ModelInfo]:
        return await self._engine.models()

    async def close(self) -> None:
        await self._engine.close()

    async def _call_engine(self, request: ModelRequest, call: Callable[[EngineClient], Awaitable[_T]]) -> _T:  # noqa: ARG002
        return await call(self._engine)

    async def _call_all(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        await call(self._engine)
