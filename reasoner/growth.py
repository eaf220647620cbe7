"""Branches in flight: engine requests that never ask for more tokens than the budget has left.

When the budget cannot promise every branch its longest possible solution, branches start with as much as is there: some
now, the rest when the first ones have ended and given back what they did not need. A branch that was cut by its promise
continues later with another one. That costs nothing: its prefix is in the engine's cache, and sampling noise depends on
the position alone, so the parts are exactly the tokens of the whole.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection
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
    limit: int
    """Tokens that the branch may have at most: context and the job's own limit."""
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
    """Runs growths on the engine. ``expected`` is the longest branch seen so far, the size of a sensible promise."""

    def __init__(
        self,
        engine: EngineClient,
        model: ModelInfo,
        ledger: Ledger,
        seed: int,
        sampling: SamplingParams,
        expected: int | None,
        lease: str,
    ) -> None:
        self._engine = engine
        self._model = model
        self._ledger = ledger
        self._seed = seed
        self._sampling = sampling
        self.expected = expected
        self._lease = lease
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._promises: dict[Growth, int] = {}
        self._arrived: asyncio.Queue[tuple[Growth, Completion] | Exception] = asyncio.Queue()

    def start(self, growths: Collection[Growth]) -> None:
        """Starts as many of the growths as the budget can promise a sensible length. Those in flight go on."""
        waiting = sorted(
            (growth for growth in growths if growth not in self._promises),
            key=lambda growth: (growth.part == 0, growth.path),  # what was cut goes on before anything new starts
        )
        if not waiting or self._ledger.exhausted:
            return
        available = self._ledger.available()
        longest = max(growth.room for growth in waiting)
        sensible = longest if self.expected is None else min(longest, self.expected)
        count = min(len(waiting), available // sensible)
        if count == 0:
            if self._promises:  # wait for what the running ones give back
                return
            count = 1
        share = available // count
        by_parent: dict[Node, list[Growth]] = {}
        for growth in waiting[:count]:
            self._promises[growth] = min(growth.room, share)
            self._ledger.reserve(self._promises[growth])
            by_parent.setdefault(growth.parent, []).append(growth)
        for parent, siblings in by_parent.items():
            self._request(parent, siblings)

    async def arrivals(self, cancelled: asyncio.Event) -> list[Arrival]:
        """All parts that have arrived, at least one; none when nothing is in flight.

        Raises ``JobCancelled`` as soon as ``cancelled`` is set, and the engine's own errors.
        """
        if cancelled.is_set():
            raise JobCancelled
        if not self._promises:
            return []
        first = asyncio.ensure_future(self._arrived.get())
        stop = asyncio.ensure_future(cancelled.wait())
        try:
            await asyncio.wait((first, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not first.done():
                first.cancel()
        if not first.done():
            raise JobCancelled
        items = [first.result()]
        while not self._arrived.empty():
            items.append(self._arrived.get_nowait())
        arrivals = [self._arrival(*item) for item in items if not isinstance(item, Exception)]
        failure = next((item for item in items if isinstance(item, Exception)), None)
        if failure is not None and not arrivals:
            raise failure
        if failure is not None:  # what did arrive is booked first; the failure comes up at the next call
            self._arrived.put_nowait(failure)
        return arrivals

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
        while not self._arrived.empty():
            item = self._arrived.get_nowait()
            if not isinstance(item, Exception):
                arrival = self._arrival(*item)
                if arrival.reason in (None, "cancelled"):
                    arrival = replace(arrival, reason="cancelled" if final else None)
                arrivals.append(arrival)
        for promise in self._promises.values():
            self._ledger.release(promise)
        self._promises.clear()
        return arrivals

    def _request(self, parent: Node, siblings: list[Growth]) -> None:
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=self._model.id,
            prompt=parent.prefix,
            branches=tuple(
                Branch(self._seed, branch_key(growth.path), self._promises[growth], growth.token_ids)
                for growth in siblings
            ),
            sampling=self._sampling,
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
                    self._arrived.put_nowait((siblings[item.index], item))
            if missing:
                raise EngineUnavailable("the engine's answer ended before all of its branches had")
        except Exception as error:  # raised again where the search waits
            self._arrived.put_nowait(error)

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
                return "step" if completion.stop in self._sampling.stop else "stop"
            case "length" if promise == growth.room:
                return "length" if growth.limit < self._model.context - len(growth.parent.prefix) else "context"
            case "length":
                return None
            case other:
                return other
