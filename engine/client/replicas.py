"""Several engines that can stand in for each other, as one.

All requests of a job go to the same engine, where its prefixes are cached: the one that comes first for the job's lease
by rendezvous hashing (Thaler and Ravishankar, "A name-based mapping scheme for rendezvous", 1996), so that an engine
that leaves or joins moves no jobs but its own. When it dies, or does not answer, what it still owes is asked of the
next one, which computes the prefix again and draws the same tokens: the prefix is the handle, and nothing is lost but
the cache. When it is back, its jobs come back to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar

from engine.client.health import ANSWER_SECONDS, MOMENT_SECONDS, Health
from engine.protocol.types import (
    Completion,
    Delta,
    EngineBusy,
    EngineClient,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
)

PATIENCE_SECONDS = 5.0
"""An engine that takes longer to say what it serves has fallen silent."""
GRACE_SECONDS = 0.5
"""How long a list of models waits for engines that are slow to answer, when others have."""
CURRENT_GRACE_SECONDS = ANSWER_SECONDS + 0.05
"""The same where what is listed has to hold now: at its end, one that has not answered counts as away."""
TICK_SECONDS = 0.5
MOST_ENGINES = 3
"""That one request is tried on: a request that brings engines down must not take all of them along."""
SOON = 0.001
"""Seconds that a request has at least when it goes on elsewhere."""

_T = TypeVar("_T")

log = logging.getLogger("reasoner.engines")


class ReplicatedEngine:
    """``EngineClient`` over engines by name. Belongs to the event loop that it is first used in.

    From the first call to ``close`` it asks the engines in the background how they are. An engine that serves a model
    otherwise than ``models`` said, another checkpoint under the same name, does not stand in for it.
    """

    def __init__(
        self, engines: Mapping[str, EngineClient], health: Health | None = None, *, current: bool = False
    ) -> None:
        """Names decide who gets what, so they must be the same in every process, as addresses are. ``health`` may be
        shared by clients in several threads. With ``current`` what ``models`` says holds now: it is for those who tell
        others how the engines are."""
        self._engines = dict(engines)
        self._current = current
        self._health = health or Health()
        for name in self._engines:
            self._health.add(name)
        self._meant: dict[str, ModelInfo] = {}
        """What ``models`` said."""
        self._running: dict[str, str] = {}
        """The engine that each request of ``generate`` is at."""
        self._aborted: set[str] = set()
        self._leases: dict[str, set[str]] = {}
        """The engines that have seen each lease."""
        self._owing: dict[str, set[asyncio.Future[Any]]] = {name: set() for name in self._engines}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None

    async def generate(
        self, request: GenerateRequest, *, stream: bool = False
    ) -> AsyncGenerator[Completion | Delta, None]:
        """See ``EngineClient``. Branches that an engine did not finish begin again on another one; what was streamed of
        them is not streamed twice."""
        loop, tried = asyncio.get_running_loop(), list[str]()
        started = loop.time()
        missing = {index: _Heard() for index in range(len(request.branches))}
        try:
            while missing:
                name = await self._choose(request.lease or request.request_id, request.model, tried)
                self._running[request.request_id] = name
                self._sees(name, request.lease)
                order = list(missing)
                part = _rest(request, order, loop.time() - started)
                try:
                    async with aclosing(self._events(name, part, stream)) as events:
                        async for event in events:
                            index = order[event.index]
                            fresh = missing[index].fresh(replace(event, index=index))
                            if isinstance(event, Completion):
                                del missing[index]
                            if fresh is not None:
                                yield fresh
                    if missing:
                        raise EngineUnavailable(f"the engine at {name} ended its answer with branches missing")
                    self._health.worked(name)
                except EngineUnavailable as error:
                    self._failed(name, error)
                    if request.request_id in self._aborted:
                        for index in list(missing):
                            yield missing.pop(index).cancelled(index)
                    elif isinstance(error, _Diverged) or not await self._may_move(request.model, tried):
                        raise
                    for heard in missing.values():
                        heard.begins_again()
        finally:
            self._running.pop(request.request_id, None)
            self._aborted.discard(request.request_id)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        """See ``EngineClient``."""

        async def ask(name: str) -> list[ScoreResult]:
            self._sees(name, request.lease)
            results = await self._engines[name].score(request)
            self._health.worked(name)
            return results

        return await self._somewhere(request.lease or request.request_id, request.model, ask)

    async def abort(self, request_id: str) -> None:
        """See ``EngineClient``. Of a request that moves, nothing is computed any more."""
        name = self._running.get(request_id)
        if name is None:
            return
        self._aborted.add(request_id)
        try:
            await self._owed(name, self._engines[name].abort(request_id))
        except EngineUnavailable:
            return  # the request hears of that itself

    async def release(self, lease: str, tokens: Sequence[int] | None = None) -> None:
        """See ``EngineClient``. Engines that are away let leases expire."""
        seen = self._leases.get(lease, set())
        if tokens is None:
            self._leases.pop(lease, None)
        here = [name for name in seen if self._health.up(name) is not None]
        await asyncio.gather(*(self._owed(name, self._engines[name].release(lease, tokens)) for name in here))

    async def tokenize(
        self,
        model: str,
        text: str | Sequence[dict[str, str]],
        *,
        special: bool = True,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """See ``EngineClient``."""

        def ask(name: str) -> Awaitable[tuple[int, ...]]:
            return self._engines[name].tokenize(model, text, special=special, generation_prompt=generation_prompt)

        return await self._somewhere(repr(text), model, ask)

    async def models(self) -> list[ModelInfo]:
        """See ``EngineClient``: what is served by the engines that answer, as the first of them says it."""
        nobody, fresh = not self._up(), MOMENT_SECONDS if self._current else None
        health = self._health
        asked = [name for name in self._engines if nobody or health.new(name) or health.due(name, fresh)]
        await self._ask(asked, CURRENT_GRACE_SECONDS if self._current else GRACE_SECONDS)
        up = self._up()
        if self._current:
            away = {known.name for known in health.snapshot() if known.state == "away"}
            up = {name: models for name, models in up.items() if name not in away}
        if not up:
            raise self._nobody()
        found: dict[str, ModelInfo] = {}
        for name, models in up.items():
            for info in models:
                if found.setdefault(info.id, info) != info:
                    _warn(f"the engine at {name} serves another {info.id!r} than the first that does: it is left out")
        self._meant = found
        return list(found.values())

    async def clear_cache(self) -> None:
        """See ``EngineClient``. Raises for the first engine that could not."""
        await asyncio.gather(*(self._owed(name, engine.clear_cache()) for name, engine in self._engines.items()))

    async def close(self) -> None:
        """See ``EngineClient``."""
        tasks = [*self._probes.values(), *([] if self._watcher is None else [self._watcher])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    # Who is asked.

    async def _choose(self, key: str, model: str, tried: list[str]) -> str:
        """The next engine for a key, which it adds to those that were tried."""
        names = self._candidates(model, tried)
        if not names:
            await self._ask(self._engines)
            names = self._candidates(model, tried)
        if not names:
            raise self._nobody() if not self._up() else EngineUnavailable(f"no engine that answers serves {model!r}")
        name = first(names, key)
        tried.append(name)
        return name

    def _candidates(self, model: str, tried: Collection[str]) -> list[str]:
        """Engines that could serve a model and were not tried. Where none of those that answer does, one of them says
        so itself; where none answers, those that have fallen silent may only be slow."""
        up = self._up()
        if model in self._meant:
            fitting = [name for name, models in up.items() if self._meant[model] in models]
        else:
            fitting = [name for name, models in up.items() if any(info.id == model for info in models)] or list(up)
        fitting = fitting or [name for name in self._engines if not up and self._health.silent(name)]
        return [name for name in fitting if name not in tried]

    async def _may_move(self, model: str, tried: Collection[str]) -> bool:
        """Whether there is an engine left to try: if need be one that was away, and may be back."""
        if len(tried) >= MOST_ENGINES:
            return False
        if not self._candidates(model, tried):
            await self._ask([name for name in self._engines if name not in tried])
        return bool(self._candidates(model, tried))

    def _up(self) -> dict[str, tuple[ModelInfo, ...]]:
        """The engines that answer, with what they serve."""
        heard = {name: self._health.up(name) for name in self._engines}
        return {name: models for name, models in heard.items() if models is not None}

    def _nobody(self) -> EngineError:
        errors = [known.error for known in self._health.snapshot() if known.name in self._engines and known.error]
        message = "; ".join(map(str, errors)) or "no engine has answered yet"
        may_come = not errors or any(isinstance(error, EngineUnavailable) for error in errors)
        return EngineUnavailable(message) if may_come else EngineError(message)

    def _sees(self, name: str, lease: str | None) -> None:
        if lease is not None:
            self._leases.setdefault(lease, set()).add(name)

    # Asking.

    async def _somewhere(self, key: str, model: str, ask: Callable[[str], Awaitable[_T]]) -> _T:
        """What the first engine says that can be asked."""
        tried: list[str] = []
        while True:
            name = await self._choose(key, model, tried)
            try:
                return await self._owed(name, ask(name))
            except EngineUnavailable as error:
                self._failed(name, error)
                if not await self._may_move(model, tried):
                    raise

    async def _events(
        self, name: str, request: GenerateRequest, stream: bool
    ) -> AsyncGenerator[Completion | Delta, None]:
        events = self._engines[name].generate(request, stream=stream)
        assert isinstance(events, AsyncGenerator)
        async with aclosing(events):
            while (event := await self._owed(name, anext(events, None))) is not None:
                yield event

    async def _owed(self, name: str, answer: Awaitable[_T]) -> _T:
        """Waits for an answer of an engine. Raises ``EngineUnavailable`` when it falls silent and others have not."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        owing = asyncio.ensure_future(answer)
        self._owing[name].add(owing)
        try:
            await asyncio.wait({owing})
        finally:
            self._owing[name].discard(owing)
            if not owing.done():
                owing.cancel()
                await asyncio.wait({owing})
                _ = owing.cancelled() or owing.exception()  # nobody is left to hear of it
        if owing.cancelled():
            raise EngineUnavailable(f"the engine at {name} has fallen silent")
        return owing.result()

    def _failed(self, name: str, error: EngineUnavailable) -> None:
        if not isinstance(error, (EngineBusy, _Diverged)):  # a full one is well, and so is one that rounds otherwise
            self._health.failed(name, error)

    # How the engines are.

    async def _ask(self, names: Iterable[str], moment: float | None = None) -> None:
        """Asks engines how they are, for a moment, and until one of them is well or none is left."""
        asking = {self._probe(name) for name in names}
        if asking:
            _, asking = await asyncio.wait(asking, timeout=GRACE_SECONDS if moment is None else moment)
        while asking and not self._up():
            _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)

    def _probe(self, name: str) -> asyncio.Task[None]:
        if name not in self._probes:
            self._probes[name] = asyncio.create_task(self._ask_one(name))
            self._probes[name].add_done_callback(lambda _: self._probes.pop(name))
        return self._probes[name]

    async def _ask_one(self, name: str) -> None:
        self._health.asking(name)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                models = await self._engines[name].models()
        except TimeoutError:
            error = EngineUnavailable(f"the engine at {name} did not answer within {PATIENCE_SECONDS:g} s")
            self._health.unwell(name, error, silent=True)
        except EngineError as error:
            self._health.unwell(name, error, silent=False)
        except Exception as error:
            failure = EngineError(f"the engine at {name} says of its models what makes no sense: {error!r}")
            self._health.unwell(name, failure, silent=False)
        else:
            self._health.answered(name, models)
        finally:
            self._health.asked(name)

    async def _watch(self) -> None:
        """Asks again in the background, and gives up on what silent engines owe as long as others answer."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for name, owing in self._owing.items():
                if self._health.due(name):
                    self._probe(name)
                if self._health.silent(name) and self._up():
                    for answer in list(owing):
                        answer.cancel()


def first(names: Iterable[str], key: str) -> str:
    """The name that comes first for a key: the same one whatever others there are, unless one of them comes before."""
    return max(names, key=lambda name: blake2b(f"{name}\n{key}".encode(), digest_size=16).digest())


class _Diverged(EngineUnavailable):
    """A branch did not become what was streamed of it: the second engine rounded otherwise. The job begins again."""


@dataclass(slots=True)
class _Heard:
    """What was streamed of a branch."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    old_text: int = 0
    old_tokens: int = 0
    """How much of what comes next came before: characters and tokens."""

    def begins_again(self) -> None:
        """Another engine starts the branch from its beginning."""
        self.old_text, self.old_tokens = sum(map(len, self.texts)), len(self.token_ids)

    def fresh(self, event: Completion | Delta) -> Completion | Delta | None:
        """What is new of an event. Raises ``_Diverged``."""
        if isinstance(event, Completion):
            known = tuple(self.token_ids)
            if not event.text.startswith("".join(self.texts)) or event.token_ids[: len(known)] != known:
                raise _Diverged("another engine ended a branch otherwise than its beginning had been streamed")
            return event
        text, token_ids, logprobs = event.text[self.old_text :], event.token_ids[self.old_tokens :], event.logprobs
        if logprobs is not None:
            logprobs = logprobs[self.old_tokens :]
        self.old_text = max(0, self.old_text - len(event.text))
        self.old_tokens = max(0, self.old_tokens - len(event.token_ids))
        self.texts.append(text)
        self.token_ids += token_ids
        return replace(event, text=text, token_ids=token_ids, logprobs=logprobs) if text or token_ids else None

    def cancelled(self, index: int) -> Completion:
        """The branch as it was when its engine was lost; nobody can say what else it had computed."""
        return Completion(index, tuple(self.token_ids), "".join(self.texts), "cancelled", None, 0.0, 0, 0)


def _rest(request: GenerateRequest, missing: Sequence[int], elapsed: float) -> GenerateRequest:
    """What is still to be asked: the missing branches, within what is left of the time."""
    sampling = request.sampling
    if 0 not in missing and sampling.prompt_logprobs is not None:  # they came with the first branch
        sampling = replace(sampling, prompt_logprobs=None)
    timeout = None if request.timeout is None else max(SOON, request.timeout - elapsed)
    branches = tuple(request.branches[index] for index in missing)
    return replace(request, branches=branches, sampling=sampling, timeout=timeout)


@lru_cache(64)
def _warn(message: str) -> None:
    """Once for each message: every job of a service says the same."""
    log.warning(message)
