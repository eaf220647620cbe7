"""Replicas of an engine behind one client: routing by prefix affinity, health probes and failover.

All requests of a job go to the same replica, where its prefixes are cached. Rendezvous hashing of the job's pin key
chooses it (Thaler and Ravishankar, "A name-based mapping scheme for rendezvous", 1996), so that a replica that leaves
or joins moves no jobs but its own. When a replica fails or stops answering, its unfinished requests go to the next one,
which computes the prefix again and samples the same tokens: nothing is lost but the cache. Jobs return to their replica
when it recovers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from engine.protocol.dispatching import DispatchingEngine, ModelRequest
from engine.protocol.types import (
    Completion,
    EngineBusy,
    EngineClient,
    EngineError,
    EngineUnavailable,
    Events,
    GenerateRequest,
    ModelInfo,
    SomeModelsAway,
    TokenizeRequest,
    Tokens,
)
from engine.remote.failover import OutputMismatch, StreamedPrefix, choose_by_rendezvous, remaining_request
from engine.remote.health import (
    PROBE_OVERDUE_SECONDS,
    REPORT_PROBE_INTERVAL_SECONDS,
    Health,
    ReplicaHealth,
    warn_once,
)

PROBE_TIMEOUT_SECONDS = 5.0
"""The time after which a replica with an unanswered probe counts as silent."""
GRACE_SECONDS = 0.5
"""The time that a list of models waits for slow replicas after others have answered."""
REPORT_GRACE_SECONDS = PROBE_OVERDUE_SECONDS + 0.05
"""The same for reports on health: at its end, a replica that has not answered counts as away."""
WATCH_INTERVAL_SECONDS = 0.5
MAX_REPLICAS_TRIED = 3
"""Per request, so that a request that crashes its engine does not crash all of them."""

_T = TypeVar("_T")

log = logging.getLogger("reasoner.engines")


class ReplicatedEngine(DispatchingEngine):
    """``EngineClient`` over replicas by name. Belongs to the event loop that it is first used in.

    From the first call until ``close`` it probes the replicas in the background. A replica that serves another
    checkpoint under the name of a model than ``models`` returned does not stand in for it.
    """

    def __init__(
        self, engines: Mapping[str, EngineClient], health: Health | None = None, *, reports_health: bool = False
    ) -> None:
        """``engines``: by name, which decides the routing and so must be the same in every process, as addresses are.
        ``health``: may be shared by clients in several threads. ``reports_health``: probe again in ``models``, for a
        client whose answer is reported to others as the present state."""
        self._engines = dict(engines)
        self._reports_health = reports_health
        self._health = health or Health()
        for name in self._engines:
            self._health.add(name)
        self._expected_models: dict[str, ModelInfo] = {}
        """The last answer of ``models``, by id."""
        self._running: dict[str, str] = {}
        """The replica of each generate request in flight, by request id."""
        self._aborted: set[str] = set()
        self._replicas_by_pin: dict[str, set[str]] = {}
        """The replicas that have seen each pin key."""
        self._pending: dict[str, set[asyncio.Future[Any]]] = {name: set() for name in self._engines}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        loop, tried = asyncio.get_running_loop(), list[str]()
        started = loop.time()
        missing = {index: StreamedPrefix() for index in range(len(request.branches))}
        try:
            while missing:
                name = await self._choose_replica(_find_key(request), request.model, tried)
                self._running[request.request_id] = name
                self._track_pin(name, request.pin_key)
                order = list(missing)
                part = remaining_request(request, order, loop.time() - started)
                try:
                    async with aclosing(self._iterate_events(name, part, stream)) as events:
                        async for event in events:
                            index = order[event.index]
                            unseen = missing[index].drop_streamed(replace(event, index=index))
                            if isinstance(event, Completion):
                                del missing[index]
                            if unseen is not None:
                                yield unseen
                    if missing:
                        raise EngineUnavailable(f"the engine at {name} ended its answer with branches missing")
                    self._health.record_success(name)
                except EngineUnavailable as error:
                    self._record_failure(name, error)
                    if request.request_id in self._aborted:
                        for index in list(missing):
                            yield missing.pop(index).to_cancelled(index)
                    elif isinstance(error, OutputMismatch) or not await self._has_next(request.model, tried):
                        raise
                    for prefix in missing.values():
                        prefix.restart()
        finally:
            self._running.pop(request.request_id, None)
            self._aborted.discard(request.request_id)

    async def abort(self, request_id: str) -> None:
        name = self._running.get(request_id)
        if name is None:
            return
        self._aborted.add(request_id)
        try:
            await self._await_or_fail_over(name, self._engines[name].abort(request_id))
        except EngineUnavailable:
            return  # its ``generate`` raises the same

    async def release(self, pin_key: str, tokens: Tokens | None = None) -> None:
        seen = self._replicas_by_pin.get(pin_key, set())
        if tokens is None:
            self._replicas_by_pin.pop(pin_key, None)
        reachable = [name for name in seen if self._health.get_models(name) is not None]  # on others pins expire
        await self._call_replicas(reachable, lambda engine: engine.release(pin_key, tokens))

    async def models(self) -> list[ModelInfo]:
        """Return the models of the replicas, each as the first that answers describes it.

        Raises ``SomeModelsAway`` if a replica that does not answer may have others than those that do, or if none
        answers and it is known what they had.
        """
        health, all_away = self._health, not self._get_served_models()
        interval = REPORT_PROBE_INTERVAL_SECONDS if self._reports_health else None
        due = [
            name for name in self._engines if all_away or health.is_unknown(name) or health.claim_probe(name, interval)
        ]
        grace_seconds = REPORT_GRACE_SECONDS if self._reports_health else GRACE_SECONDS
        await self._probe_and_wait(due, grace_seconds, needs_answer=not self._reports_health)
        up = self._get_served_models()
        replicas = [replica for replica in health.snapshot() if replica.name in self._engines]
        if self._reports_health:
            overdue = {replica.name for replica in replicas if replica.state == "away"}
            up = {name: models for name, models in up.items() if name not in overdue}
        if not up:
            error, last = self._no_replica_error(), _list_models(replicas)
            raise SomeModelsAway(str(error), [], last) if last and isinstance(error, EngineUnavailable) else error
        by_id: dict[str, ModelInfo] = {}
        for name, models in up.items():
            for info in models:
                if by_id.setdefault(info.id, info) != info:
                    warn_once(f"the engine at {name} serves another {info.id!r} than the first: it is left out")
        self._expected_models = by_id
        if missing := [replica for replica in replicas if replica.name not in up and _may_have_more(replica, by_id)]:
            message = "; ".join(str(replica.error) for replica in missing if replica.error)
            away = [info for info in _list_models(missing) if info.id not in by_id]
            raise SomeModelsAway(message or "an engine has not answered yet", list(by_id.values()), away)
        return list(by_id.values())

    async def close(self) -> None:
        tasks = [*self._probes.values(), *([] if self._watcher is None else [self._watcher])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    # Routing.

    async def _choose_replica(self, key: str, model: str, tried: list[str]) -> str:
        """Return the next replica for a key, and add it to ``tried``. Raises ``EngineError`` if there is none."""
        names = self._find_candidates(model, tried)
        if not names:
            await self._probe_and_wait(self._engines)
            names = self._find_candidates(model, tried)
        if not names and self._get_served_models():
            raise EngineUnavailable(f"no engine that answers serves {model!r}")
        if not names:
            raise self._no_replica_error()
        name = choose_by_rendezvous(names, key)
        tried.append(name)
        return name

    def _find_candidates(self, model: str, tried: Collection[str]) -> list[str]:
        """Return the replicas that may serve a model and were not tried.

        If none of those that answer serves it, all of them are candidates, since their error is more precise.
        If none answers, the silent ones are, which may only be slow.
        """
        up = self._get_served_models()
        if model in self._expected_models:
            candidates = [name for name, models in up.items() if self._expected_models[model] in models]
        else:
            candidates = [name for name, models in up.items() if any(info.id == model for info in models)] or list(up)
        candidates = candidates or [name for name in self._engines if not up and self._health.is_silent(name)]
        return [name for name in candidates if name not in tried]

    async def _has_next(self, model: str, tried: Collection[str]) -> bool:
        """Return True if a replica is left to try, if need be one that was away and is back."""
        if len(tried) >= MAX_REPLICAS_TRIED:
            return False
        if not self._find_candidates(model, tried):
            await self._probe_and_wait([name for name in self._engines if name not in tried])
        return bool(self._find_candidates(model, tried))

    def _get_served_models(self) -> dict[str, tuple[ModelInfo, ...]]:
        """Return the models of the replicas that answer."""
        served = {name: self._health.get_models(name) for name in self._engines}
        return {name: models for name, models in served.items() if models is not None}

    def _no_replica_error(self) -> EngineError:
        replicas = [replica for replica in self._health.snapshot() if replica.name in self._engines]
        errors = [replica.error for replica in replicas if replica.error]
        message = "; ".join(map(str, errors)) or "no engine has answered yet"
        may_recover = not errors or any(isinstance(error, EngineUnavailable) for error in errors)
        return EngineUnavailable(message) if may_recover else EngineError(message)

    def _track_pin(self, name: str, pin_key: str | None) -> None:
        if pin_key is not None:
            self._replicas_by_pin.setdefault(pin_key, set()).add(name)

    # Calls.

    async def _call_engine(self, request: ModelRequest, call: Callable[[EngineClient], Awaitable[_T]]) -> _T:
        """Return the answer of the first replica that gives one."""
        tried: list[str] = []
        while True:
            name = await self._choose_replica(_find_key(request), request.model, tried)
            if not isinstance(request, TokenizeRequest):
                self._track_pin(name, request.pin_key)
            try:
                answer = await self._await_or_fail_over(name, call(self._engines[name]))
            except EngineUnavailable as error:
                self._record_failure(name, error)
                if not await self._has_next(request.model, tried):
                    raise
            else:
                if not isinstance(request, TokenizeRequest):
                    self._health.record_success(name)
                return answer

    async def _call_all(self, call: Callable[[EngineClient], Awaitable[None]]) -> None:
        await self._call_replicas(self._engines, call)

    async def _call_replicas(self, names: Iterable[str], call: Callable[[EngineClient], Awaitable[None]]) -> None:
        await asyncio.gather(*(self._await_or_fail_over(name, call(self._engines[name])) for name in names))

    async def _iterate_events(self, name: str, request: GenerateRequest, stream: bool) -> Events:
        async with aclosing(self._engines[name].generate(request, stream=stream)) as events:
            while (event := await self._await_or_fail_over(name, anext(events, None))) is not None:
                yield event

    async def _await_or_fail_over(self, name: str, call: Awaitable[_T]) -> _T:
        """Await a call to a replica. Raises ``EngineUnavailable`` if the replica turns silent while others answer."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        pending = asyncio.ensure_future(call)
        self._pending[name].add(pending)
        try:
            await asyncio.wait({pending})
        finally:
            self._pending[name].discard(pending)
            if not pending.done():
                pending.cancel()
                await asyncio.wait({pending})
                _ = pending.cancelled() or pending.exception()  # retrieved, so that the event loop does not log it
        if pending.cancelled():
            raise EngineUnavailable(f"the engine at {name} has stopped answering")
        return pending.result()

    def _record_failure(self, name: str, error: EngineUnavailable) -> None:
        if not isinstance(error, (EngineBusy, OutputMismatch)):  # both are healthy
            self._health.record_failure(name, error)

    # Health.

    async def _probe_and_wait(
        self, names: Iterable[str], grace_seconds: float = GRACE_SECONDS, *, needs_answer: bool = True
    ) -> None:
        """Probe replicas. Wait for the grace period; with ``needs_answer`` then until one of all replicas answers or
        every probe has ended."""
        probes = {self._start_probe(name) for name in names}
        if probes:
            _, probes = await asyncio.wait(probes, timeout=grace_seconds)
        while probes and needs_answer and not self._get_served_models():
            _, probes = await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)

    def _start_probe(self, name: str) -> asyncio.Task[None]:
        if name not in self._probes:
            self._probes[name] = asyncio.create_task(self._probe(name))
            self._probes[name].add_done_callback(lambda _: self._probes.pop(name))
        return self._probes[name]

    async def _probe(self, name: str) -> None:
        self._health.record_probe_started(name)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                models = await self._engines[name].models()
        except TimeoutError:
            error = EngineUnavailable(f"the engine at {name} did not answer within {PROBE_TIMEOUT_SECONDS:g} s")
            self._health.record_probe_failure(name, error, is_silent=True)
        except EngineError as error:
            self._health.record_probe_failure(name, error, is_silent=False)
        except Exception as error:
            failure = EngineError(f"the engine at {name} answered with an invalid list of models: {error!r}")
            self._health.record_probe_failure(name, failure, is_silent=False)
        else:
            self._health.record_models(name, models)
        finally:
            self._health.record_probe_ended(name)

    async def _watch(self) -> None:
        """Probe in the background. Cancel the calls to silent replicas while others answer."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)
            for name, pending in self._pending.items():
                if self._health.claim_probe(name):
                    self._start_probe(name)
                if self._health.is_silent(name) and self._get_served_models():
                    for call in list(pending):
                        call.cancel()


def _list_models(replicas: Iterable[ReplicaHealth]) -> list[ModelInfo]:
    """Return the models that replicas have, or had, each as the first of them describes it."""
    by_id: dict[str, ModelInfo] = {}
    for replica in replicas:
        for info in replica.models:
            by_id.setdefault(info.id, info)
    return list(by_id.values())


def _may_have_more(replica: ReplicaHealth, models: Collection[str]) -> bool:
    """Return True if a replica that does not answer may serve a model that is not among ``models``."""
    may_answer = replica.error is None or isinstance(replica.error, EngineUnavailable)
    return may_answer and (not replica.models or any(info.id not in models for info in replica.models))


def _find_key(request: ModelRequest) -> str:
    """Return the key that keeps the requests of a job on one replica."""
    return repr(request.text) if isinstance(request, TokenizeRequest) else request.pin_key or request.request_id
