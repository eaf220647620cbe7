"""Branches in flight: engine requests that never ask for more tokens than the budget has left.

When the budget cannot promise every branch its longest possible solution, branches start with as much as is there: some
now, the rest when the first ones have ended and given back what they did not need. A branch that was cut by its promise
continues later with another one. That costs nothing: its prefix is in the engine's cache, and sampling noise depends on
the position alone, so the parts are exactly the tokens of the whole.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from engine.types import (
    Branch,
    Completion,
    EngineClient,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
)
from reasoner.budget import Ledger
from reasoner.jobs import Usage
from reasoner.journal import JobCancelled
from reasoner.tree import Node, Reason, branch_key

ABORT_PATIENCE = 10.0
"""Seconds to wait for an engine to hand back aborted branches; it does so at its next step."""


@dataclass(slots=True, eq=False)
class Growth:
    """A branch that is being grown: a child-to-be of ``parent``, in one part or several."""

    op: str
    parent: Node
    path: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    """Tokens that the branch may have at most: context and the job's own limit."""
    call: int = 0
    """Which call of the strategy asked for it, counted within its stream."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprob: float = 0.0
    part: int = 0

    @property
    def key(self) -> str:
        return f"{self.op}:{'.'.join(map(str, self.path))}:{self.part}"

    @property
    def room(self) -> int:
        return self.limit - len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A part of a branch, with what it cost and the promise that it settles."""

    growth: Growth
    token_ids: tuple[int, ...]
    text: str
    logprob: float
    spend: Usage
    promise: int
    reason: Reason | None
    """Why the branch ended; ``None`` when it only used up its promise and goes on."""


class Grower:
    """Runs growths on the engine. ``longest`` holds the longest branch of each operation: a sensible promise."""

    def __init__(
        self,
        engine: EngineClient,
        model: ModelInfo,
        ledger: Ledger,
        seed: int,
        longest: Mapping[str, int],
        lease: str,
        cancelled: asyncio.Event,
    ) -> None:
        self._engine = engine
        self._model = model
        self._ledger = ledger
        self._seed = seed
        self._longest = longest
        self._lease = lease
        self._cancelled = cancelled
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._promises: dict[Growth, int] = {}
        self._ready: dict[Growth, Completion] = {}
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def start(self, growths: Collection[Growth]) -> None:
        """Starts as many of the growths as the budget can promise a sensible length. Those in flight go on."""
        waiting = sorted(
            (growth for growth in growths if growth not in self._promises),
            key=lambda growth: (growth.part == 0, growth.path),  # what was cut goes on before anything new starts
        )
        if not waiting or self._ledger.exhausted:
            return
        available = self._ledger.available()
        sensible = max(min(growth.room, self._longest.get(growth.op, growth.room)) for growth in waiting)
        count = min(len(waiting), available // sensible)
        if count == 0:
            if self._promises:  # wait for what the running ones give back
                return
            count = 1
        share = available // count
        requests: dict[tuple[Node, SamplingParams], list[Growth]] = {}
        for growth in waiting[:count]:
            self._promises[growth] = min(growth.room, share)
            self._ledger.reserve(self._promises[growth])
            requests.setdefault((growth.parent, growth.sampling), []).append(growth)
        for siblings in requests.values():
            self._request(siblings)

    async def arrivals(self, *, wave: bool) -> list[Arrival]:
        """Parts that have arrived, at least one; none when nothing is in flight. With ``wave`` they are all parts in
        flight of the earliest call, in the order of their paths; else what is there.

        Raises ``JobCancelled`` as soon as the job is, and the engine's own errors.
        """
        while True:
            if self._cancelled.is_set():
                raise JobCancelled
            ready = list(self._ready)
            if wave:
                first = min((growth.call for growth in self._promises), default=0)
                ready = sorted(
                    (growth for growth in self._promises if growth.call == first), key=lambda growth: growth.path
                )
            if all(growth in self._ready for growth in ready) and (ready or not self._promises):
                return [self._arrival(growth, self._ready.pop(growth)) for growth in ready]
            if self._failure is not None:  # what did arrive was handed over before
                raise self._failure
            await self._wait()

    def cut(self, growths: Collection[Growth]) -> list[Arrival]:
        """Ends the branches that have a part and can get no more: the budget is used up."""
        reason: Reason = "timeout" if self._ledger.seconds_left() == 0.0 else "budget"
        return [Arrival(growth, (), "", 0.0, Usage(), 0, reason) for growth in growths if growth.part > 0]

    async def stop(self, *, final: bool) -> list[Arrival]:
        """Aborts what is in flight and answers what it got so far.

        ``final`` ends the aborted branches as ``cancelled``; otherwise what they got is a part that can be continued.
        """
        for request_id in list(self._requests):  # requests leave as their branches end
            try:
                await self._engine.abort(request_id)
            except EngineError:
                continue  # the engine is gone, and the request's own task fails with it
        if self._requests:
            _, late = await asyncio.wait(self._requests.values(), timeout=ABORT_PATIENCE)
            for task in late:
                task.cancel()
        arrivals = []
        for growth, completion in self._ready.items():
            arrival = self._arrival(growth, completion)
            if arrival.reason in (None, "cancelled"):
                arrival = replace(arrival, reason="cancelled" if final else None)
            arrivals.append(arrival)
        self._ready.clear()
        for promise in self._promises.values():
            self._ledger.release(promise)
        self._promises.clear()
        return arrivals

    async def _wait(self) -> None:
        """Until a branch has arrived, the engine has failed, or the job is cancelled."""
        self._news.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._news, self._cancelled)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _request(self, siblings: list[Growth]) -> None:
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=self._model.id,
            prompt=siblings[0].parent.prefix,
            branches=tuple(
                Branch(self._seed, branch_key(growth.path), self._promises[growth], growth.token_ids)
                for growth in siblings
            ),
            sampling=siblings[0].sampling,
            timeout=self._ledger.seconds_left(),
            lease=self._lease,
        )
        task = asyncio.create_task(self._listen(request, siblings))
        self._requests[request.request_id] = task
        task.add_done_callback(lambda _: self._requests.pop(request.request_id, None))

    async def _listen(self, request: GenerateRequest, siblings: list[Growth]) -> None:
        missing = set(range(len(siblings)))
        try:
            async for item in self._engine.generate(request):
                if isinstance(item, Completion):
                    missing.remove(item.index)
                    self._ready[siblings[item.index]] = item
                    self._news.set()
            if missing:
                raise EngineUnavailable("the engine's answer ended before all of its branches had")
        except Exception as error:  # raised again where the search waits
            self._failure = error
            self._news.set()

    def _arrival(self, growth: Growth, completion: Completion) -> Arrival:
        promise = self._promises.pop(growth)
        wrong = completion.drafted_tokens - completion.accepted_tokens
        computed = completion.prompt_tokens - completion.cached_tokens + len(completion.token_ids) + wrong
        spend = Usage(
            prompt=completion.prompt_tokens,
            cached=completion.cached_tokens,
            generated=len(completion.token_ids),
            drafted=completion.drafted_tokens,
            accepted=completion.accepted_tokens,
            flops=2.0 * self._model.parameters * computed,
        )
        reason = self._reason(growth, completion, promise)
        return Arrival(growth, completion.token_ids, completion.text, completion.logprob, spend, promise, reason)

    def _reason(self, growth: Growth, completion: Completion, promise: int) -> Reason | None:
        match completion.finish_reason:
            case "stop":
                return "step" if completion.stop in growth.sampling.stop else "stop"
            case "length" if promise == growth.room:
                return "length" if growth.limit < self._model.context - len(growth.parent.prefix) else "context"
            case "length":
                return None
            case other:
                return other
