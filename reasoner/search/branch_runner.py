"""Branches in flight: engine requests that never ask for more tokens than the budget has left.

When the budget cannot promise every branch its longest possible solution, branches start with as much as is there: some
now, the rest when the first ones have ended and given back what they did not need. A branch that was cut by its promise
continues later with another one. That costs nothing: its prefix is in the engine's cache, and sampling noise depends on
the position alone, so the parts are exactly the tokens of the whole.

For the same reason the engine is asked for a branch in stretches, and between them somebody may look at it: a branch
that loops ends there, and so does one that its strategy's ``Watch`` has seen enough of.
"""

from __future__ import annotations

import asyncio
import uuid
from bisect import bisect
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.protocol.types import (
    Branch,
    Completion,
    EngineClient,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
)
from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import NO_AMOUNT, Amount
from reasoner.budget.usage import Usage
from reasoner.confidence.token_confidence import compute_token_confidence
from reasoner.jobs.journal import JobCancelled
from reasoner.jobs.spec import Sampling
from reasoner.search.repetition import HORIZON, loops
from reasoner.tree import Node, Reason, make_branch_key

ABORT_PATIENCE = 10.0
"""Seconds to wait for an engine to hand back aborted branches; it does so at its next step."""
SOON = 0.001
"""Seconds that a request has at least: when the last stretch used up the time, the next one ends at once."""
STRETCH = 512
"""Tokens that a branch is asked for at a time. Asking again costs it about one step of the engine."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A growing branch as a ``Watch`` sees it: what it has beyond its parent."""

    parent: Node
    text: str
    confidence: tuple[float, ...]
    """Of each token, if its call asked for that."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Looks at a branch whenever its length is a multiple of ``every`` tokens, and ends it with the reason that
    ``verdict`` answers. It must depend on nothing but what it sees and what the strategy knew when it made it."""

    every: int
    verdict: Callable[[Seen], Reason | Awaitable[Reason | None] | None]


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
    watch: Watch | None = None
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprob: float = 0.0
    confidence: tuple[float, ...] = ()
    part: int = 0
    end: dict[str, Any] | None = None
    """The last part as the journal holds it, once the branch has ended."""
    equality: Hashable | None = field(init=False)
    """The same for branches that must be equal: each continues one text by the likeliest tokens. ``None`` where chance
    decides."""

    def __post_init__(self) -> None:
        if takes_likeliest(self.sampling):  # whatever else would have been left to chance
            sampling = replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
            self.equality = (self.op, self.parent.prefix, self.parent.solution, sampling, self.limit, self.watch)
        else:
            self.equality = None

    @property
    def id(self) -> str:
        """The node's."""
        return ".".join(map(str, self.path))

    @property
    def key(self) -> str:
        return f"{self.op}:{self.id}:{self.part}"

    @property
    def room(self) -> int:
        return self.limit - len(self.token_ids)

    @property
    def stretch(self) -> int:
        """Its requests end where its length is a multiple of this, if not before."""
        return STRETCH if self.watch is None else self.watch.every

    def read(self, tokens: int) -> int:
        """Tokens that the requests for so many more of it send, one request for each stretch."""
        sent, have, end = 0, len(self.token_ids), len(self.token_ids) + tokens
        while have < end:
            sent += len(self.parent.prefix) + have
            have += self.stretch - have % self.stretch
        return sent

    def loops(self, more: tuple[int, ...]) -> bool:
        """Whether the solution would end in a loop if the branch went on with these tokens."""
        tokens = self.token_ids + more
        if len(tokens) < HORIZON:
            tokens = self.parent.written + tokens
        return loops(tokens)

    async def verdict(self, more: Completion) -> Reason | None:
        """Why the branch should end where it is with this addition, if it should."""
        if self.loops(more.token_ids):
            return "repetition"
        tokens = len(self.token_ids) + len(more.token_ids)
        if self.watch is None or tokens % self.watch.every:
            return None
        found = self.watch.verdict(Seen(self.parent, self.text + more.text, self.confidence + confidences(more)))
        return await found if isinstance(found, Awaitable) else found


@dataclass(frozen=True, slots=True)
class Arrival:
    """A part of a branch, with what it cost and the promise that it settles."""

    growth: Growth
    token_ids: tuple[int, ...]
    text: str
    logprob: float
    spend: Usage
    promise: Amount
    reason: Reason | None
    """Why the branch ended; ``None`` when it only used up its promise and goes on."""
    confidence: tuple[float, ...] = ()
    closed: bool = False
    """Whether its last token is one that ended the text and is no part of it."""


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
        self._rate = ledger.rate_of_model(model)
        self._reading = ledger.budget.flops is not None or ledger.budget.cost is not None
        self._promises: dict[Growth, Amount] = {}
        self._so_far: dict[Growth, Completion] = {}
        """The stretches of branches in flight that have arrived, joined."""
        self._verdicts: dict[Growth, Reason] = {}
        self._stopping = False
        self._ready: dict[Growth, Completion] = {}
        self._unread: list[Arrival] = []
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    def start(self, growths: Collection[Growth]) -> None:
        """Starts as many of the growths as the budget can promise a sensible length. Those in flight go on."""
        waiting = sorted(
            (growth for growth in growths if growth not in self._promises),
            key=lambda growth: (growth.part == 0, growth.path),  # what was cut goes on before anything new starts
        )
        if not waiting or self._ledger.is_exhausted:
            return
        sensible = max(min(growth.room, self._longest.get(growth.op, growth.room)) for growth in waiting)
        aside = [self._verification(waiting[:count], sensible) for count in range(len(waiting) + 1)]
        count = bisect(
            range(1, len(waiting) + 1),
            False,
            key=lambda count: not self._fit(waiting[:count], sensible, aside[count]),
        )
        if count == 0 and self._promises:  # better to wait for what the running ones give back
            return
        head = waiting[: max(1, count)]
        longest = max(growth.room for growth in head)
        share = bisect(range(1, longest + 1), False, key=lambda tokens: not self._fit(head, tokens, aside[count]))
        if share == 0:
            return
        requests: dict[tuple[Node, SamplingParams], list[Growth]] = {}
        for growth in head:
            promise = self._most([growth], share)
            self._ledger.reserve(promise)
            self._promises[growth] = promise
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

    def put_back(self, arrivals: Sequence[Arrival]) -> None:
        """Takes arrivals back that could not be written: ``stop`` answers them again."""
        self._unread += arrivals

    def cut(self, growths: Collection[Growth]) -> list[Arrival]:
        """Ends the branches that have a part and can get no more: the budget is used up."""
        reason: Reason = "timeout" if self._ledger.seconds_left() == 0.0 else "budget"
        return [Arrival(growth, (), "", 0.0, Usage(), NO_AMOUNT, reason) for growth in growths if growth.part > 0]

    async def stop(self, *, final: bool) -> list[Arrival]:
        """Aborts what is in flight and answers what it got so far.

        ``final`` ends the aborted branches as ``cancelled``; otherwise what they got is a part that can be continued.
        """
        self._stopping = True
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
        for arrival in [*self._unread, *(self._arrival(*ready) for ready in self._ready.items())]:
            if arrival.reason in (None, "cancelled"):
                arrival = replace(arrival, reason="cancelled" if final else None)
            arrivals.append(arrival)
        self._unread.clear()
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

    def _fit(self, growths: Sequence[Growth], tokens: int, aside: Amount) -> bool:
        """Whether the budget can promise each of the growths so many tokens, or those that it may have, and leave
        ``aside`` untouched."""
        whole = all(growth.op == "complete" for growth in growths)  # a branch that goes to its end is what is kept for
        return self._ledger.max_affordable(self._most(growths, tokens) + aside, whole=whole) >= 1

    def _verification(self, growths: Sequence[Growth], sensible: int) -> Amount:
        """About what the verifier will want for these growths and for those in flight, by what it took so far: a
        branch that there is nothing left to score is worth little. Nothing for no growths: then it is the rest that
        is used up."""
        usage = self._ledger.usage
        if not growths or not usage.verifier_computed:
            return NO_AMOUNT
        going = sum(
            min(promise.tokens, self._longest.get(growth.op, promise.tokens))
            for growth, promise in self._promises.items()
        )
        wanted = going + sum(min(growth.room, sensible) for growth in growths)
        return Amount(tokens=wanted * usage.verifier_computed // max(1, usage.generated))

    def _most(self, growths: Sequence[Growth], tokens: int) -> Amount:
        """The most that so many tokens for each take."""
        wanted = [min(growth.room, tokens) for growth in growths]
        read = sum(growth.read(more) for growth, more in zip(growths, wanted, strict=True)) if self._reading else 0
        return self._rate.max_branch_amount(read, sum(wanted))

    def _request(self, siblings: list[Growth]) -> None:
        left = self._ledger.seconds_left()
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=self._model.id,
            prompt=siblings[0].parent.prefix,
            branches=tuple(self._branch(growth) for growth in siblings),
            sampling=siblings[0].sampling,
            timeout=None if left is None else max(left, SOON),
            lease=self._lease,
            draft=self._ledger.budget.flops is None,
        )
        task = asyncio.create_task(self._listen(request, siblings))
        self._requests[request.request_id] = task
        task.add_done_callback(lambda _: self._requests.pop(request.request_id, None))

    def _branch(self, growth: Growth) -> Branch:
        """The next stretch of a branch, to where somebody looks at it or its promise ends."""
        so_far = self._so_far.get(growth)
        tokens = growth.token_ids + (() if so_far is None else so_far.token_ids)
        every = growth.stretch
        left = self._promises[growth].tokens - (len(tokens) - len(growth.token_ids))
        return Branch(self._seed, make_branch_key(growth.path), min(left, every - len(tokens) % every), tokens)

    async def _listen(self, request: GenerateRequest, siblings: list[Growth]) -> None:
        missing = set(range(len(siblings)))
        try:
            async for item in self._engine.generate(request):
                if isinstance(item, Completion):
                    missing.remove(item.index)
                    await self._hear(siblings[item.index], item)
            if missing:
                raise EngineUnavailable("the engine's answer ended before all of its branches had")
        except Exception as error:  # raised again where the search waits, after what did arrive
            for growth in [siblings[index] for index in missing if siblings[index] in self._so_far]:
                self._ready[growth] = self._so_far.pop(growth)
            self._failure = error
            self._news.set()

    async def _hear(self, growth: Growth, stretch: Completion) -> None:
        """Adds a stretch to its branch, which goes on, or is ready because it ended or used up its promise."""
        so_far = self._so_far.pop(growth, None)
        whole = stretch if so_far is None else joined(so_far, stretch)
        length = len(whole.token_ids)
        if stretch.finish_reason == "length" and length < growth.room:
            verdict = await growth.verdict(whole)
            if verdict is not None:
                self._verdicts[growth] = verdict
            elif length < self._promises[growth].tokens and not self._stopping:
                self._so_far[growth] = whole
                self._request([growth])
                return
        self._ready[growth] = whole
        self._news.set()

    def _arrival(self, growth: Growth, completion: Completion) -> Arrival:
        promise = self._promises.pop(growth)
        spend = self._rate.branch_usage(
            prompt=completion.prompt_tokens,
            cached=completion.cached_tokens,
            generated=len(completion.token_ids),
            drafted=completion.drafted_tokens,
            accepted=completion.accepted_tokens,
        )
        reason = self._verdicts.pop(growth, None) or self._reason(growth, completion, promise.tokens)
        return Arrival(
            growth,
            completion.token_ids,
            completion.text,
            completion.logprob,
            spend,
            promise,
            reason,
            confidences(completion),
            completion.finish_reason == "stop" and isinstance(completion.stop, int),
        )

    def _reason(self, growth: Growth, completion: Completion, promise: int) -> Reason | None:
        match completion.finish_reason:
            case "stop" if completion.stop in growth.sampling.stop:
                return "repetition" if growth.loops(completion.token_ids) else "step"
            case "stop":
                return "stop"
            case "length" if promise == growth.room:
                return "length" if growth.limit < self._model.context - len(growth.parent.prefix) else "context"
            case "length":
                return None
            case other:
                return other


def takes_likeliest(sampling: SamplingParams | Sampling) -> bool:
    """Return true if every token is the likeliest one, so that siblings are equal."""
    return sampling.temperature == 0 or sampling.top_k == 1


def joined(first: Completion, then: Completion) -> Completion:
    """Two stretches of a branch as one: what both added, what both cost, and how the second one ended."""
    logprobs = None if then.logprobs is None else (*(first.logprobs or ()), *then.logprobs)
    return replace(
        then,
        token_ids=first.token_ids + then.token_ids,
        text=first.text + then.text,
        logprob=first.logprob + then.logprob,
        prompt_tokens=first.prompt_tokens + then.prompt_tokens,
        cached_tokens=first.cached_tokens + then.cached_tokens,
        logprobs=logprobs,
        drafted_tokens=first.drafted_tokens + then.drafted_tokens,
        accepted_tokens=first.accepted_tokens + then.accepted_tokens,
    )


def confidences(completion: Completion) -> tuple[float, ...]:
    """Of each token, where the request asked for the likeliest ones."""
    return tuple(compute_token_confidence(token) for token in completion.logprobs or ())
