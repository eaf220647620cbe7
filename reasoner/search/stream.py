"""Branches that a strategy grows while it listens: add work at any time, hear of every branch as soon as it ends.

A stream writes the journal before the strategy sees anything, so a replay hands over the same batches in the same
order. In a ``deterministic`` job it hands over waves: the branches of one call together, in path order, the calls in
the order in which they were made. A wave does not depend on which branch was quick. What is in flight when a stream is
left then stays out of the tree and is billed as lost, and its promises stay held, so that what is left of a budget is
the same however far it had come.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from engine.protocol.types import EngineClient, ModelInfo, SamplingParams
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.extraction.phrases import ExtractionStopped
from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import NO_AMOUNT, Amount
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry, JobCancelled
from reasoner.jobs.spec import JobSpec
from reasoner.search.branch_runner import Arrival, Grower, Growth, Watch, takes_likeliest
from reasoner.search.grants import Grants
from reasoner.search.replay import EARLY, LOST, Answer, Record
from reasoner.search.shared_branches import Copies, copied
from reasoner.tree import Node, Reason

STEP_SEPARATOR = "\n\n"
STEPS = 4
"""A branch is likely to need no more tokens to its end than so many steps of the longest kind so far. One that needs
more has mostly come some way when the search ends."""
ENDED: Mapping[Reason, ExtractionStopped] = {"step": "step", "stop": "end"}
"""What a branch's end means for the answer that it may be stating; anything else cut it."""


@dataclass(slots=True, eq=False)
class Shared:
    """What all streams of one search share."""

    spec: JobSpec
    seed: int
    engine: EngineClient
    policy: ModelInfo
    lease: str
    ledger: Ledger
    record: Record
    cancelled: asyncio.Event
    answers: AnswerFinder
    root: Node
    cut_short: bool = False
    """Whether the budget kept the search from something that the strategy asked for."""
    longest: dict[str, int] = field(default_factory=dict)
    """Tokens of the longest branch so far, by operation."""
    copies: Copies = field(default_factory=Copies)
    streams: set[Stream] = field(default_factory=set)
    """Those that are open."""
    grants: Grants | None = None
    """Of a job that shares a budget."""
    finish_one: Callable[[], Awaitable[bool]] | None = None
    """See ``Search``."""

    async def more(self, *, steps: bool) -> bool:
        """Return whether it may be worth trying again what the budget did not reach. ``steps``: whether it was a step
        of a search or its score, from which a part of the budget is kept."""
        if self.grants is not None and await self.grants.more():
            return True
        return steps and self.finish_one is not None and await self.finish_one()

    def keep(self) -> None:
        """Keep as much of the budget as one branch takes to its end, as far as the steps so far tell."""
        rate, prompt, most = self.ledger.rate_of_model(self.policy), len(self.root.prefix), self.room(self.root)
        likely = min(most, STEPS * self.longest.get("expand", most))
        self.ledger.set_aside(*(rate.max_branch_amount(prompt + tokens, tokens) for tokens in (most, likely)))

    def room(self, node: Node) -> int:
        """See ``Search.room``."""
        room = self.policy.context - len(node.prefix)
        limit = self.spec.sampling.max_tokens
        return room if limit is None else min(room, limit - node.depth_tokens)


class Stream:
    """Use it as a context, and iterate over it inside; ``Search.stream`` makes one.

    Iterating yields all new nodes that are ready, at least one, and ends when every branch that was asked for has ended
    or when the budget is used up: branches that never started are then missing, and one that was cut says ``budget``.
    More work may be added after that. Leaving the context ends what still runs.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._wanted: dict[str, Growth] = {}
        self._calls = 0
        self._grower = Grower(
            shared.engine, shared.policy, shared.ledger, shared.seed, shared.longest, shared.lease, shared.cancelled
        )

    def expand(self, parents: Sequence[Node], n: int | Sequence[int], *, greedy: bool = False) -> int:
        """Continues each parent by one step, ``n`` times (or ``n[i]`` times parent ``i``).

        ``greedy`` takes the likeliest token each time. Answers how many branches that makes: a parent that fills the
        context or the job's own limit has none.
        """
        return self._add("expand", parents, n, (STEP_SEPARATOR,), greedy=greedy)

    def complete(
        self,
        parents: Sequence[Node],
        n: int | Sequence[int],
        *,
        greedy: bool = False,
        until: str | None = None,
        limit: int | None = None,
        confidence: int | None = None,
        watch: Watch | None = None,
    ) -> int:
        """Like ``expand``, to the end of the solution, or ``until`` this text (the node then ends with it, and as a
        step), or to ``limit`` tokens at most.

        With ``confidence`` the nodes tell how sure the model was of each token, by this many likeliest tokens. A
        ``watch`` looks at the branches while they grow; one that it gives up (``pruned``) counts as wasted.
        """
        stop = () if until is None else (until,)
        return self._add("complete", parents, n, stop, greedy=greedy, limit=limit, confidence=confidence, watch=watch)

    async def __aenter__(self) -> Stream:
        self._shared.streams.add(self)
        return self

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Node]:
        while self._wanted:
            landed = await self._next_batch()
            if not landed:
                self._shared.cut_short = True
                self._wanted.clear()
                break
            ready = [node for growth, data in landed if (node := self._land(growth, data)) is not None]
            if ready:
                return ready
        raise StopAsyncIteration

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self not in self._shared.streams:  # ``Search.close`` was here before
            return
        self._shared.streams.discard(self)
        # The strategy has heard enough, or nobody wants to hear more. With any other error the engine is gone or this
        # attempt is, and the next one goes on from the parts.
        final = error is None or isinstance(error, (GeneratorExit, JobCancelled))
        record = self._shared.record
        for entry in [*record.replay(self._wanted), *record.unheard]:
            if entry.key in self._wanted:
                self._land(self._wanted[entry.key], entry.data)
        in_flight = await self._grower.stop(final=final)
        answers: list[Answer] = []
        if self._shared.spec.deterministic:
            answers = [lost(arrival, withhold=final) for arrival in in_flight]
            in_flight = []
        if final and not record.replaying:
            going = {arrival.growth for arrival in in_flight}
            begun = [growth for growth in self._wanted.values() if growth.part > 0 and growth not in going]
            in_flight += [Arrival(growth, (), "", 0.0, Usage(), NO_AMOUNT, "cancelled") for growth in begun]
        answers += [await self._answer(arrival) for arrival in in_flight]
        entries = await record.write(answers if final else [early(answer) for answer in answers])
        for entry in entries:
            if final and entry.key in self._wanted:
                self._land(self._wanted[entry.key], entry.data)

    async def abandon(self) -> None:
        """For a search that ends while this stream is open: ends what runs. The next attempt goes on from the parts,
        but in a deterministic job, where they would not come in waves: there they are lost."""
        self._shared.streams.discard(self)
        in_flight = await self._grower.stop(final=False)
        if self._shared.spec.deterministic:
            await self._shared.record.write([lost(arrival) for arrival in in_flight])
        else:
            await self._shared.record.write([early(await self._answer(arrival)) for arrival in in_flight])

    def _add(
        self,
        op: str,
        parents: Sequence[Node],
        n: int | Sequence[int],
        stop: tuple[str, ...],
        *,
        greedy: bool,
        limit: int | None = None,
        confidence: int | None = None,
        watch: Watch | None = None,
    ) -> int:
        asked = self._shared.spec.sampling
        sampling = SamplingParams(
            temperature=0.0 if greedy else asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            stop=stop,
            logprobs=confidence,
        )
        before = len(self._wanted)
        counts = [n] * len(parents) if isinstance(n, int) else n
        for parent, count in zip(parents, counts, strict=True):
            room = self._shared.room(parent)
            if limit is not None:
                room = min(room, limit)
            if room <= 0:
                continue
            for index in range(parent.created, parent.created + count):
                growth = Growth(op, parent, (*parent.path, index), sampling, room, self._calls, watch)
                self._wanted[growth.key] = growth
            parent.created += count
        self._calls += 1
        return len(self._wanted) - before

    async def _next_batch(self) -> list[tuple[Growth, dict[str, Any]]]:
        """The next parts of branches, from the journal or from the engine; nothing when the budget is used up."""
        record = self._shared.record
        entries = record.early(self._wanted)
        if not entries and record.replaying:
            entries = record.replay(self._wanted)
            if not entries and await self._more():
                return await self._next_batch()
        elif not entries:
            originals = {growth: self._shared.copies.original(growth, self._grows) for growth in self._wanted.values()}
            copies = [copied(growth, first) for growth, first in originals.items() if first is not None and first.end]
            if copies:
                return self._answered(await record.write(copies))
            self._grower.start([growth for growth, first in originals.items() if first is None])
            arrivals = await self._grower.arrivals(wave=self._shared.spec.deterministic)
            if not arrivals and await self._more():
                return await self._next_batch()
            if not arrivals:
                arrivals = self._grower.cut(self._wanted.values())
            try:
                answers = [await self._answer(arrival) for arrival in arrivals]
            except BaseException:  # to find an answer may take time, and nothing that was paid for gets lost in it
                self._grower.put_back(arrivals)
                raise
            entries = await record.write(answers)
        return self._answered(entries)

    def _answered(self, entries: Sequence[Entry]) -> list[tuple[Growth, dict[str, Any]]]:
        return [(self._wanted[entry.key], entry.data) for entry in entries]

    async def _more(self) -> bool:
        return await self._shared.more(steps=any(growth.op == "expand" for growth in self._wanted.values()))

    def _grows(self, growth: Growth) -> bool:
        return self._wanted.get(growth.key) is growth

    async def _answer(self, arrival: Arrival) -> Answer:
        growth = arrival.growth
        reason, stated = arrival.reason, None
        if reason is not None:
            solution = growth.parent.solution + growth.text + arrival.text
            stated = await self._shared.answers.find(solution, ENDED.get(reason, "inside"))
            if stated is not None and reason == "step":
                reason = "answer"
        spend = arrival.spend
        if reason == "pruned":
            spend = spend + Usage(pruned=len(growth.token_ids) + len(arrival.token_ids))
        data = {
            "node": growth.id,
            "parent": growth.parent.id,
            "part": growth.part,
            "text": arrival.text,
            "token_ids": list(arrival.token_ids),
            "tokens": len(arrival.token_ids),
            "cached": arrival.spend.cached,
            "logprob": arrival.logprob,
            "final": reason is not None,
            "reason": reason,
            "answer": stated,
            "closed": arrival.closed,
        }
        if growth.sampling.logprobs is not None:
            data["confidence"] = list(arrival.confidence)
        return Answer(growth.key, "node", data, spend, arrival.promise)

    def _land(self, growth: Growth, data: dict[str, Any]) -> Node | None:
        """Applies a part to its branch; answers the node once the branch has ended."""
        del self._wanted[growth.key]
        growth.token_ids += tuple(data["token_ids"])
        growth.text += data["text"]
        growth.logprob += data["logprob"]
        growth.confidence += tuple(data.get("confidence", ()))
        growth.part += 1
        reason: Reason | None = data["reason"]
        if reason is None:
            self._wanted[growth.key] = growth
            return None
        growth.end = data
        self._shared.copies.ended(growth)
        self._shared.cut_short |= reason in ("budget", "timeout")
        longest = self._shared.longest
        longest[growth.op] = max(longest.get(growth.op, 1), len(growth.token_ids))
        if growth.op == "expand" and self._shared.ledger.is_setting_aside:
            self._shared.keep()
        node = Node(
            path=growth.path,
            parent=growth.parent,
            prefix=growth.parent.prefix + growth.token_ids,
            text=growth.text,
            tokens=len(growth.token_ids),
            logprob=0.0 if takes_likeliest(self._shared.spec.sampling) else growth.logprob,
            reason=reason,
            answer=data["answer"],
            confidence=growth.confidence,
            closed=data.get("closed", False),
            is_copy="copy_of" in data,
        )
        growth.parent.children.append(node)
        if node.answer is not None:
            self._shared.ledger.release_set_aside()
        return node


def early(answer: Answer) -> Answer:
    """An answer that comes while the strategy may wait for something else; see ``Record.early``."""
    return replace(answer, data=answer.data | {EARLY: True})


def lost(arrival: Arrival, *, withhold: bool = False) -> Answer:
    """Tokens that are on the bill and nowhere else. ``withhold`` keeps the rest of their promise from being given out
    again: how much that is depends on how quick the branch was."""
    rest = arrival.promise - Amount.from_usage(arrival.spend) if withhold else NO_AMOUNT
    data = {"node": arrival.growth.id, "tokens": len(arrival.token_ids), "withheld": list(rest)}
    return Answer(f"lost:{uuid.uuid4().hex}", LOST, data, arrival.spend, arrival.promise - rest)
