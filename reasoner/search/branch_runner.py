"""Run branches on the engine, never requesting more tokens than the budget has left.

If the budget cannot reserve the longest possible solution for every branch, some start now and the others when the
first ones have ended and released what they did not need. A branch that used up its reservation continues later with a
new one. That costs nothing: its prefix is in the engine's cache, and sampling noise depends on the position alone, so
the parts are exactly the tokens of the whole.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from engine.protocol.constraint import Constraint
from engine.protocol.request_checks import make_refusal
from engine.protocol.types import (
    Branch,
    Completion,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    SamplingParams,
    Tokens,
)
from reasoner.deadline import run_unless
from reasoner.jobs.journal import JobCancelled
from reasoner.search.generation import BranchPart, Generation, State
from reasoner.search.policies.availability import make_absence
from reasoner.search.reservations import Reservations
from reasoner.search.rules.rule import NextRequest
from reasoner.search.stream_context import StreamContext
from reasoner.tree import Node, make_branch_key

ABORT_TIMEOUT_SECONDS = 10.0
"""Time that an engine has to return aborted branches, which it does at its next step."""
MIN_REQUEST_SECONDS = 0.001
"""Shortest timeout of a request: where the last segment used up the time, the next one ends at once."""


class BranchRunner:
    """Runs the branches of one stream on the engine."""

    def __init__(self, context: StreamContext) -> None:
        search = context.search
        self._search = search
        self._seed = context.seed
        self._job_stops = frozenset(search.spec.stop)
        self._reservations = Reservations(context)
        self._availability = context.availability
        readers = [search.calls.reader if search.calls is not None else None, search.functions]
        self._needs_special_tokens = any(reader is not None and reader.needs_special_tokens for reader in readers)
        self._in_flight: set[Generation] = set()
        """Branches that hold a reservation."""
        self._ready: list[Generation] = []
        """The ready ones among them, in the order of their arrival."""
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def start(self, branches: Collection[Generation]) -> None:
        """Start as many of the branches as the budget can reserve a sensible length for; those in flight continue."""
        if self._search.ledger.is_exhausted:
            return
        waiting = sorted(
            (branch for branch in branches if branch.state is State.WAITING),
            key=lambda branch: (branch.num_parts == 0, *self._get_order(branch)),  # cut branches go before new ones
        )
        for branch in waiting:
            if branch.is_calling:
                self._reserve(branch, 0)
                self._start_call(branch)
        waiting = [branch for branch in waiting if branch.state is State.WAITING]
        if not waiting:
            return
        starting, max_tokens = self._reservations.select(waiting, self._in_flight)
        if max_tokens > 0:
            for branch in starting:
                self._reserve(branch, max_tokens)
            self._request_segments(starting)

    async def arrivals(self, *, wave: bool) -> list[BranchPart]:
        """Wait for parts and return them, at least one; none if nothing is in flight.

        With ``wave`` they are all parts in flight of the earliest call, in the order of their paths. Branches stay
        ready until ``take``. Raises ``JobCancelled`` as soon as the job is cancelled, and the engine's own errors.
        """
        while True:
            if self._search.cancelled.is_set():
                raise JobCancelled
            expected = self._first_wave() if wave else self._ready
            if all(branch.state is State.READY for branch in expected) and (expected or not self._in_flight):
                return [self._make_part(branch) for branch in expected]
            if self._failure is not None:  # after everything that did arrive
                raise self._failure
            self._changed.clear()
            await run_unless(self._search.cancelled, self._changed.wait)

    def take(self, parts: Iterable[BranchPart]) -> None:
        """Hand over parts, with their reservations, to whoever writes them into the journal."""
        for part in parts:
            self._in_flight.discard(part.branch)
            part.branch.discard_part()
        self._ready = [branch for branch in self._ready if branch in self._in_flight]

    async def stop(self, *, final: bool) -> list[BranchPart]:
        """Abort what is in flight, and take what it got so far.

        ``final`` ends the aborted branches as ``cancelled``; otherwise they can be continued.
        """
        self._stopping.set()
        for request_id in list(self._requests):  # requests leave the dictionary as their branches end
            try:
                await self._search.engine.abort(request_id)
            except EngineError:
                continue  # the engine is gone, and the request's own task fails with it
        if self._requests:
            _, late = await asyncio.wait(self._requests.values(), timeout=ABORT_TIMEOUT_SECONDS)
            for task in late:
                task.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        parts = []
        for part in [self._make_part(branch) for branch in self._ready]:
            if part.reason in (None, "cancelled"):
                part = replace(part, reason="cancelled" if final else None)
            parts.append(part)
        self.take(parts)
        for branch in self._in_flight:
            self._search.ledger.release(branch.reservation)
            branch.discard_part()
        self._in_flight.clear()
        return parts

    def _get_order(self, branch: Generation) -> tuple[tuple[int, ...], ...]:
        """Return the branch's place among those that start: by path, with several policies in turns."""
        return (branch.path,) if len(self._search.policies) == 1 else (branch.path[1:], branch.path[:1])

    def _first_wave(self) -> list[Generation]:
        """Return the branches in flight of the earliest call, in the order of their paths."""
        first = min((branch.wave for branch in self._in_flight), default=0)
        return sorted((branch for branch in self._in_flight if branch.wave == first), key=lambda branch: branch.path)

    def _make_part(self, branch: Generation) -> BranchPart:
        now = self._search.ledger.elapsed_seconds()
        return branch.make_part(self._reservations.rate(branch), self._job_stops, now)

    def _reserve(self, branch: Generation, tokens: int) -> None:
        self._reservations.reserve(branch, tokens)
        branch.requested_at = self._search.ledger.elapsed_seconds()
        self._in_flight.add(branch)

    def _add_ready(self, branch: Generation) -> None:
        self._ready.append(branch)
        self._changed.set()

    def _fail(self, error: Exception | None) -> None:
        """Let ``arrivals`` raise an error after everything that did arrive."""
        self._failure = self._failure or error
        self._changed.set()

    # Requests.

    def _request_segments(self, branches: Sequence[Generation]) -> None:
        """Request the next segments of branches; siblings under equal conditions are one request."""
        groups: dict[tuple[Node, SamplingParams, Constraint | None, Tokens], dict[Generation, NextRequest]] = {}
        for branch in branches:
            request = branch.prepare_request()
            if request is None:
                self._add_ready(branch)
                continue
            conditions = branch.parent, request.sampling, request.constraint, request.constraint_escape_tokens
            groups.setdefault(conditions, {})[branch] = request
        for siblings in groups.values():
            self._send(siblings)

    def _send(self, siblings: Mapping[Generation, NextRequest]) -> None:
        request = self._make_request(siblings)
        task = asyncio.create_task(self._read_stream(request, list(siblings)))
        self._requests[request.request_id] = task
        task.add_done_callback(lambda _: self._requests.pop(request.request_id, None))

    def _make_request(self, siblings: Mapping[Generation, NextRequest]) -> GenerateRequest:
        branch, first = next(iter(siblings.items()))
        search, parent = self._search, branch.parent
        left = search.ledger.seconds_left()
        policy = search.policy(parent)
        pin_key = search.prefix_pin.key
        return GenerateRequest(
            request_id=f"{pin_key}-{uuid.uuid4().hex}",  # which servers and routers write into their logs
            model=policy.model.id,
            prompt=parent.prefix,
            branches=tuple(self._make_branch(*sibling) for sibling in siblings.items()),
            sampling=first.sampling,
            timeout=None if left is None else max(left, MIN_REQUEST_SECONDS),
            pin_key=pin_key,
            draft=search.ledger.budget.flops is None,
            probe=policy.reads_probe,
            thinking_limit=search.spec.thinking_tokens if policy.model.limits_thoughts else None,
            constraint=first.constraint,
            skip_special_tokens=not (self._needs_special_tokens and parent.is_solution),
            constraint_escape_tokens=first.constraint_escape_tokens,
        )

    def _make_branch(self, branch: Generation, request: NextRequest) -> Branch:
        *above, index = branch.path
        return Branch(
            self._seed,
            make_branch_key(branch.path),
            request.max_tokens,
            branch.current.token_ids,
            sibling=(make_branch_key(tuple(above)), index),
            constraint_start=request.constraint_start,
        )

    async def _read_stream(self, request: GenerateRequest, siblings: list[Generation]) -> None:
        missing = set(range(len(siblings)))
        try:
            async for item in self._search.engine.generate(request):
                if isinstance(item, Completion):
                    self._availability.record_answer(siblings[0].parent.policy)
                    missing.remove(item.index)
                    await self._add_segment(siblings[item.index], item)
            if missing:
                raise EngineUnavailable("the engine's answer ended before all of its branches had")
        except Exception as error:
            waiting, refusal = [siblings[index] for index in missing], None
            if isinstance(error, EngineUnavailable):
                policy, seconds_left = siblings[0].parent.policy, self._search.ledger.seconds_left()
                may_return = self._availability.record_failure(policy)
                if may_return and seconds_left != 0.0:
                    await self._ask_again(waiting, self._availability.find_pause(policy, error, seconds_left))
                    return
                if may_return is not None:
                    refusal = make_absence(error)
            elif isinstance(error, EngineError):
                refusal = make_refusal(error)
            for branch in waiting:
                if refusal is not None:
                    branch.refuse(refusal)
                elif branch.arrived.token_ids:
                    branch.finish(None)
                else:
                    continue
                self._add_ready(branch)
            self._fail(None if refusal else error)

    async def _ask_again(self, branches: Sequence[Generation], pause: float) -> None:
        """Request branches again after a pause in seconds, since their server is away.

        Those that have tokens go into the journal instead, from which the strategy starts them anew.
        """
        waiting = [branch for branch in branches if not branch.arrived.token_ids]
        for branch in branches:
            if branch.arrived.token_ids:
                branch.finish(None)
                self._add_ready(branch)
        await run_unless(self._stopping, lambda: asyncio.sleep(pause))
        if not self._stopping.is_set():
            self._request_segments(waiting)

    async def _add_segment(self, branch: Generation, segment: Completion) -> None:
        """Add a segment to its branch, and request the next one if the branch goes on."""
        await branch.add_segment(segment)
        if branch.state is not State.READY and self._stopping.is_set():
            branch.finish(None)
        if branch.state is State.READY:
            self._add_ready(branch)
        else:
            self._request_segments([branch])

    # Calls of tools.

    def _start_call(self, branch: Generation) -> None:
        """Begin to run the call with which a branch ends."""
        branch.state = State.IN_TOOL
        call = asyncio.create_task(self._run_call(branch))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _run_call(self, branch: Generation) -> None:
        assert self._search.calls is not None  # as the branch has a call
        try:
            branch.add_output(await self._search.calls.run(branch.current))
        except Exception as error:
            self._fail(error)
        else:
            self._add_ready(branch)
