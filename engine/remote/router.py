"""Routing of requests by model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from engine.protocol.dispatching import DispatchingEngine, ModelRequest
from engine.protocol.types import (
    EngineClient,
    EngineError,
    EngineUnavailable,
    Events,
    GenerateRequest,
    ModelInfo,
    SomeModelsAway,
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KnownProperties:
    """Properties of a model that its server may not report. ``extra``: entries that replace those of ``ModelInfo``."""

    extra: Mapping[str, object] = field(default_factory=dict)
    parameters: int | None = None

    def add_to(self, info: ModelInfo) -> ModelInfo:
        return replace(info, extra={**info.extra, **self.extra}, parameters=self.parameters or info.parameters)


class RoutedEngine(DispatchingEngine):
    """``EngineClient`` that sends the requests of each model to the engine that serves it."""

    def __init__(
        self,
        main: EngineClient,
        overrides: Mapping[str, EngineClient],
        known: Mapping[str, KnownProperties] | None = None,
    ) -> None:
        """``overrides``: engines of single models by name; ``main`` serves all others. ``known``: by model."""
        self._main = main
        self._overrides = dict(overrides)
        self._known = dict(known or {})

    def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        return self._engine_for(request.model).generate(request, stream=stream)

    async def models(self) -> list[ModelInfo]:
        """Return the models of all engines.

        Raises ``SomeModelsAway`` if some engines do not answer and others do, and ``EngineError`` if an engine in
        ``overrides`` does not serve its model.
        """
        engines = self._all
        answers = await asyncio.gather(*(engine.models() for engine in engines), return_exceptions=True)
        by_engine = {id(engine): answer for engine, answer in zip(engines, answers, strict=True)}
        listed = {
            engine: answer.known if isinstance(answer, SomeModelsAway) else answer
            for engine, answer in by_engine.items()
            if isinstance(answer, SomeModelsAway | list)
        }
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        fatal = next((error for error in failures if not isinstance(error, EngineUnavailable)), None)
        if fatal is not None or (failures and not listed):
            raise fatal or failures[0]
        away = {engine: error.away for engine, error in by_engine.items() if isinstance(error, SomeModelsAway)}
        models = self._select(listed, away)
        if failures:
            raise SomeModelsAway("; ".join(map(str, failures)), models, self._select(away, away))
        return models

    def _select(self, listed: Mapping[int, list[ModelInfo]], partly_away: Collection[int]) -> list[ModelInfo]:
        """Return the models, each as the engine that is meant for it lists it, by the engines' ids.

        ``partly_away``: engines that may have more models than they list.
        """
        models = [info for info in listed.get(id(self._main), ()) if info.id not in self._overrides]
        for name, engine in self._overrides.items():
            if id(engine) not in listed:
                continue
            served = listed[id(engine)]
            matching = [info for info in served if info.id == name]
            if not matching and id(engine) not in partly_away:
                others = ", ".join(info.id for info in served) or "nothing"
                raise EngineError(f"the server that is configured for model {name!r} does not serve it, but {others}")
            models += matching
        return [self._known[info.id].add_to(info) if info.id in self._known else info for info in models]

    async def close(self) -> None:
        await self._call_all(lambda engine: engine.close())

    async def _call_engine(self, request: ModelRequest, call: Callable[[EngineClient], Awaitable[_T]]) -> _T:
        return await call(self._engine_for(request.model))

    async def _call_all(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        await asyncio.gather(*map(call, self._all))

    @property
    def _all(self) -> list[EngineClient]:
        """Each engine once, though it may serve several of the models."""
        return list({id(engine): engine for engine in (self._main, *self._overrides.values())}.values())

    def _engine_for(self, model: str) -> EngineClient:
        return self._overrides.get(model, self._main)
