"""Scripted engines behind one client, for the tests of replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineClient,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    ModelInfo,
    ScoreItem,
    ScoreRequest,
    TokenizeRequest,
)
from engine.remote.failover import choose_by_rendezvous
from engine.remote.health import Health
from engine.remote.replicas import ReplicatedEngine
from tests.scripted import ScriptedEngine

NAMES = tuple(f"http://engine{number}:8100" for number in range(4))


BRANCHES = tuple(Branch(3, key, 40) for key in range(6))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched(Health):
    """Notifies a test of every change and every access by the client."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.looks = 0
        self.news = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def is_silent(self, name: str) -> bool:
        self.looks += 1
        self.news.set()
        return super().is_silent(name)


class Engine(ScriptedEngine):
    """Engine that can be full, dead or silent, or serve other models; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.serves = [ModelInfo("policy", "generate", 256, 100, 1000), ModelInfo("prm", "classify", 256, 100, 1000)]
        self.dead = False
        self.hangs = False
        self.refuses: EngineError | None = None
        self.dies_after: int | None = None
        self.asked: Counter[str] = Counter()
        self.hanging = asyncio.Event()
        self.closed = False
        self.aborts: list[str] = []
        self.released: list[str] = []

    async def answer(self, kind: str) -> None:
        self.asked[kind] += 1
        if self.hangs:
            if kind != "models":
                self.hanging.set()
            await asyncio.Event().wait()
        if self.dead:
            raise EngineUnavailable("dead")

    async def models(self) -> list[ModelInfo]:
        await self.answer("models")
        return self.serves

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        await self.answer("generate")
        if self.refuses is not None:
            raise self.refuses
        async for event in super().generate(request, stream=stream):
            await self.count()
            if stream and isinstance(event, Completion):
                middle = len(event.token_ids) // 2
                cut = len(event.text) // 3  # other boundaries of texts and tokens
                yield Delta(event.index, event.text[:cut], event.token_ids[:middle])
                await self.count()
                yield Delta(event.index, event.text[cut:], event.token_ids[middle:])
                await self.count()
            yield event

    async def count(self) -> None:
        if self.dies_after is not None:
            self.dead = self.dead or self.dies_after == 0
            self.dies_after -= 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.dead:
            raise EngineUnavailable("dead")

    async def score(self, request):  # type: ignore[no-untyped-def]
        await self.answer("score")
        return await super().score(request)

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        await self.answer("tokenize")
        return await super().tokenize(request)

    async def abort(self, request_id: str) -> None:
        await self.answer("abort")
        self.aborts.append(request_id)
        await super().abort(request_id)

    async def release(self, pin_key, tokens=None):  # type: ignore[no-untyped-def]
        await self.answer("release")
        self.released.append(pin_key)
        await super().release(pin_key, tokens)

    async def close(self) -> None:
        self.closed = True


class Fleet:
    """A client, its engines, and a clock that a test advances."""

    def __init__(self, count: int = 2) -> None:
        self.clock = Clock()
        self.engines = {name: Engine() for name in NAMES[:count]}
        self.health = Watched(self.clock)
        self.client = ReplicatedEngine(self.engines, self.health)

    def order(self, pin_key: str = "job") -> list[Engine]:
        """Return the engines in the order of preference for a pin key."""
        left, order = set(self.engines), []
        while left:
            order.append(choose_by_rendezvous(left, pin_key))
            left.remove(order[-1])
        return [self.engines[name] for name in order]

    def states(self) -> list[str]:
        known = {one.name: one.state for one in self.health.snapshot()}
        return [known[next(name for name, engine in self.engines.items() if engine is one)] for one in self.order()]


def request(pin_key: str = "job", *, request_id: str = "r", branches: tuple[Branch, ...] = BRANCHES) -> GenerateRequest:
    return GenerateRequest(request_id, "policy", (7, 8, 9), branches, pin_key=pin_key)


def scoring(pin_key: str | None = "job") -> ScoreRequest:
    return ScoreRequest("s", "prm", (ScoreItem(((1,), (2,)), (1,)),), pin_key=pin_key)


async def completions(engine: EngineClient, wanted: GenerateRequest, *, stream: bool = False) -> list[Completion]:
    events = [event async for event in engine.generate(wanted, stream=stream)]
    return sorted((event for event in events if isinstance(event, Completion)), key=lambda one: one.index)
