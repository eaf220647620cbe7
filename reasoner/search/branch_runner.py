"""Run branches on the engine, never requesting more tokens than the budget has left.

If the budget cannot reserve the longest possible solution for every branch, some start now and the others when the
first ones have ended and released what they did not need. A branch that used up its reservation continues later with a
new one. That costs nothing: its prefix is in the engine's cache, and sampling noise depends on the position alone, so
the parts are exactly the tokens of the whole.

For the same reason a branch is generated in segments. Between them it is checked for loops and by its ``Watch``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from engine.protocol.request_checks import make_refusal
from engine.protocol.types import (
    Branch,
    Completion,
    EngineError,
    EngineUnavailable,
    GenerateRequest,
    SamplingParams,
)
from reasoner.deadline import run_unless
from reasoner.jobs.journal import JobCancelled
from reasoner.search.branch import NOTHING, BranchPart, InFlightBranch, join_segments, token_confidences
from reasoner.search.calls import BranchCalls, Output
from reasoner.search.reservations import Reservations
from reasoner.search.stream_context import StreamContext
from reasoner.thoughts import ThoughtProgress
from reasoner.tree import Node, Reason, make_branch_key

ABORT_TIMEOUT_SECONDS = 10.0
"""Time that an engine has to return aborted branches, which it does at its next step."""
MIN_REQUEST_SECONDS = 0.001
"""Shortest timeout of a request: where the last segment used up the time, the next one ends at once."""


class BranchRunner:
    """Runs the branches of one stream on the engine."""

    def __init__(self, context: StreamContext) -> None:
        self._seed = context.seed
        self._lease = context.search.lease.name
        self._engine = context.search.engine
        self._policies = context.search.policies
        self._ledger = context.search.ledger
        self._cancelled = context.search.cancelled
        self._thinking_tokens = context.search.spec.thinking_tokens
        self._job_stops = frozenset(context.search.spec.stop)
        self._constraint = context.search.constraint
        self._is_only_demanded = context.search.spec.constraint is None
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._reserved = Reservations(context)
        self._segments: dict[InFlightBranch, Completion] = {}
        """Joined segments that have arrived of branches that continue."""
        self._thoughts: dict[InFlightBranch, ThoughtProgress] = {}
        """Thoughts of the branches in flight, where they are no longer where their last part left them."""
        self._stop_reasons: dict[InFlightBranch, Reason] = {}
        self._calls = BranchCalls(context.search.calls)
        functions = context.search.functions
        self._shows_special = self._calls.shows_special or (functions is not None and functions.shows_special)
        self._ready: dict[InFlightBranch, Completion] = {}
        self._put_back_parts: list[BranchPart] = []
        self._is_stopping = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def start(self, branches: Collection[InFlightBranch]) -> None:
        """Start as many of the branches as the budget can reserve a sensible length for; those in flight continue."""
        waiting = sorted(
            (branch for branch in branches if branch not in self._reserved),
            key=lambda branch: (branch.part == 0, *self._order(branch)),  # cut branches continue before new ones start
        )
        if not waiting or self._ledger.is_exhausted:
            return
        for branch in [branch for branch in waiting if branch.is_calling]:
            waiting.remove(branch)
            self._reserved.add(branch, 0)
            self._calls.run(branch, partial(self._add_output, branch), self._fail)
        if not waiting:
            return
        starting, max_tokens = self._reserved.select(waiting)
        if max_tokens == 0:
            return
        requests: dict[tuple[Node, SamplingParams, bool], list[InFlightBranch]] = {}
        for branch in starting:
            self._reserved.add(branch, max_tokens)
            if self._close_thought_at_limit(branch):
                key = branch.parent, self._sampling(branch), self._is_constrained(branch)
                requests.setdefault(key, []).append(branch)
        for siblings in requests.values():
            self._request(siblings)

    async def arrivals(self, *, wave: bool) -> list[BranchPart]:
        """Wait for parts and return them, at least one; none if nothing is in flight.

        With ``wave`` they are all parts in flight of the earliest call, in the order of their paths. Raises
        ``JobCancelled`` as soon as the job is cancelled, and the engine's own errors.
        """
        while True:
            if self._cancelled.is_set():
                raise JobCancelled
            expected = self._first_wave() if wave else list(self._ready)
            if all(branch in self._ready for branch in expected) and (expected or not self._reserved):
                return [self._part(branch, self._ready.pop(branch)) for branch in expected]
            if self._failure is not None:  # after everything that did arrive
                raise self._failure
            self._changed.clear()
            await run_unless(self._cancelled, self._changed.wait)

    def put_back(self, parts: Sequence[BranchPart]) -> None:
        """Take back parts that could not be written; ``stop`` returns them again."""
        self._put_back_parts += parts

    async def stop(self, *, final: bool) -> list[BranchPart]:
        """Abort what is in flight and return what it got so far.

        ``final`` ends the aborted branches as ``cancelled``; otherwise they can be continued.
        """
        self._is_stopping = True
        for request_id in list(self._requests):  # requests leave the dictionary as their branches end
            try:
                await self._engine.abort(request_id)
            except EngineError:
                continue  # the engine is gone, and the request's own task fails with it
        if self._requests:
            _, late = await asyncio.wait(self._requests.values(), timeout=ABORT_TIMEOUT_SECONDS)
            for task in late:
                task.cancel()
        await self._calls.cancel()
        parts = []
        for part in [*self._put_back_parts, *(self._part(*ready) for ready in self._ready.items())]:
            if part.reason in (None, "cancelled"):
                part = replace(part, reason="cancelled" if final else None)
            parts.append(part)
        self._put_back_parts.clear()
        self._ready.clear()
        self._reserved.release_all()
        return parts

    # Requests.

    def _can_continue(self, branch: InFlightBranch, num_tokens: int | None = None) -> bool:
        """Return True if another request may go on, after so many tokens; there a constrained text may still begin."""
        policy = self._policies[branch.parent.policy]
        is_whole = "constraint_continuation" in policy.model.lacks and self._is_constrained(branch)
        if is_whole and num_tokens is not None:
            start = branch.find_constraint_start(self._thought(branch), num_tokens)
            is_whole = start < len(branch.parent.prefix) + num_tokens
        return policy.can_continue and not is_whole

    def _is_constrained(self, branch: InFlightBranch) -> bool:
        """Return True if the branch's next token is part of the text that the job's constraint holds."""
        thought = self._thought(branch)
        is_free = thought is not None and not thought.can_begin_answer
        if self._is_only_demanded and thought is not None and thought.state == "undecided":
            # Where a server cannot lift it for a thought, calls that 'tool_choice' demands are filtered instead.
            is_free |= "constraint_continuation" in self._policies[branch.parent.policy].model.lacks
        return self._constraint is not None and branch.parent.solves and not is_free

    def _order(self, branch: InFlightBranch) -> tuple[tuple[int, ...], ...]:
        """Return the branch's place among those that start: by path, with several policies in turns."""
        return (branch.path,) if len(self._policies) == 1 else (branch.path[1:], branch.path[:1])

    def _request(self, siblings: list[InFlightBranch]) -> None:
        left = self._ledger.seconds_left()
        policy = self._policies[siblings[0].parent.policy]
        request = GenerateRequest(
            request_id=f"{self._lease}-{uuid.uuid4().hex}",  # which servers and routers write into their logs
            model=policy.model.id,
            prompt=siblings[0].parent.prefix,
            branches=tuple(self._next_segment(branch) for branch in siblings),
            sampling=self._sampling(siblings[0]),
            timeout=None if left is None else max(left, MIN_REQUEST_SECONDS),
            lease=self._lease,
            draft=self._ledger.budget.flops is None,
            probe=policy.reads_probe,
            thinking_limit=self._thinking_tokens if policy.model.limits_thoughts else None,
            constraint=self._constraint if self._is_constrained(siblings[0]) else None,
            shows_special=self._shows_special and siblings[0].parent.solves,
            lifts_constraint=self._find_lifting_tokens(siblings[0]),
        )
        task = asyncio.create_task(self._read_stream(request, siblings))
        self._requests[request.request_id] = task
        task.add_done_callback(lambda _: self._requests.pop(request.request_id, None))

    def _next_segment(self, branch: InFlightBranch) -> Branch:
        """Return the request for a branch's tokens up to its next check or the end of its reservation."""
        segments = self._segments.get(branch)
        tokens = branch.token_ids + (() if segments is None else segments.token_ids)
        every = branch.segment_tokens
        num_new = len(tokens) - len(branch.token_ids)
        left = self._reserved.tokens(branch) - num_new
        thought = self._thought(branch)
        if thought is not None:
            left = min(left + self._num_injected(branch), branch.tokens_left - num_new)
            left = thought.max_tokens(left, must_decide=bool(branch.stops_outside_thoughts))
        *above, index = branch.path
        sibling = make_branch_key(tuple(above)), index
        if self._can_continue(branch) and (thought is None or thought.can_be_cut):
            left = min(left, every - len(tokens) % every)
        start = branch.find_constraint_start(thought, len(tokens)) if self._is_constrained(branch) else None
        return Branch(self._seed, make_branch_key(branch.path), left, tokens, sibling, start)

    def _find_lifting_tokens(self, branch: InFlightBranch) -> tuple[int, ...]:
        """Return the token that opens a thought instead of the constrained answer, if the model has the choice."""
        thought = self._thought(branch)
        has_choice = self._is_constrained(branch) and thought is not None and thought.state == "undecided"
        return thought.format.opening_ids[:1] if has_choice and thought is not None else ()

    async def _read_stream(self, request: GenerateRequest, siblings: list[InFlightBranch]) -> None:
        missing = set(range(len(siblings)))
        try:
            async for item in self._engine.generate(request):
                if isinstance(item, Completion):
                    missing.remove(item.index)
                    await self._add_segment(siblings[item.index], item)
            if missing:
                raise EngineUnavailable("the engine's answer ended before all of its branches had")
        except Exception as error:
            is_passing = isinstance(error, EngineUnavailable)
            refusal = make_refusal(error) if isinstance(error, EngineError) and not is_passing else None
            for branch in [siblings[index] for index in missing if refusal or siblings[index] in self._segments]:
                segments = self._segments.pop(branch, NOTHING)
                end = "refused" if refusal else segments.finish_reason
                self._ready[branch] = replace(segments, finish_reason=end, refusal=refusal)
            self._fail(None if refusal else error)

    def _fail(self, error: Exception | None) -> None:
        """Let ``arrivals`` raise an error after everything that did arrive."""
        self._failure = self._failure or error
        self._changed.set()

    async def _add_segment(self, branch: InFlightBranch, segment: Completion) -> None:
        """Add a segment to its branch, and request the next one unless the branch ended or used up its reservation."""
        segments = self._segments.pop(branch, None)
        segment = self._read_thought(branch, segment, segments)
        whole = segment if segments is None else join_segments(segments, segment)
        thought = self._thought(branch)
        if branch.ends_with_call(replace(segment, text=whole.text), thought, self._job_stops):
            end_of_turn = whole.stop if isinstance(whole.stop, int) else None
            whole = replace(whole, finish_reason="length", stop=end_of_turn)
            if not self._calls.add(branch):
                self._stop_reasons[branch] = "tool"
        elif branch.is_short_step(whole, thought, segment.stop):
            segment = replace(segment, finish_reason="length", stop=None)
            whole = replace(whole, finish_reason="length", stop=None)
        if (
            branch not in self._calls
            and segment.finish_reason == "length"
            and len(whole.token_ids) < branch.tokens_left
        ):
            reason = await branch.find_stop_reason(whole)
            generated = len(whole.token_ids) - self._num_injected(branch)
            if reason is not None:
                self._stop_reasons[branch] = reason
            elif not self._can_continue(branch, len(branch.token_ids) + len(whole.token_ids)):
                self._stop_reasons[branch] = "budget"
            elif generated < self._reserved.tokens(branch) and not self._is_stopping:
                self._segments[branch] = whole
                if self._close_thought_at_limit(branch):
                    self._request([branch])
                return
        self._ready[branch] = whole
        self._changed.set()

    # Thoughts.

    def _thought(self, branch: InFlightBranch) -> ThoughtProgress | None:
        return self._thoughts.get(branch, branch.thought)

    def _sampling(self, branch: InFlightBranch) -> SamplingParams:
        thought = self._thought(branch)
        return branch.sampling if thought is None else thought.adapt(branch.sampling, branch.stops_outside_thoughts)

    def _num_injected(self, branch: InFlightBranch) -> int:
        """Return the number of tokens of the branch's next part that were not generated."""
        thought = self._thought(branch)
        if thought is None or branch.thought is None:
            return 0
        return thought.num_injected - branch.thought.num_injected

    def _read_thought(self, branch: InFlightBranch, segment: Completion, earlier: Completion | None) -> Completion:
        """Follow the thought through a segment. One that its end has stopped goes on with the answer."""
        thought = self._thought(branch)
        if thought is None:
            return segment
        written = branch.parent.written + branch.token_ids + (() if earlier is None else earlier.token_ids)
        written = written[max(0, len(written) - sum(part.num_tokens for part in thought.turn_parts)) :]
        closes = thought.closes(segment, written)
        thought, segment = thought.add(segment, written)
        if closes:
            rest = thought.format.rest_ids
            segment = replace(segment, stop=None, token_ids=segment.token_ids + rest)
            thought = thought.inject("", len(rest))
            if branch.ends_with_thought:
                self._stop_reasons[branch] = "step"
            else:
                segment = replace(segment, finish_reason="length")
        self._thoughts[branch] = thought
        return segment

    def _close_thought_at_limit(self, branch: InFlightBranch) -> bool:
        """Inject the end of a thought that is at its limit; return False if the branch ends with it."""
        thought = self._thought(branch)
        if thought is None or not thought.is_at_limit:
            return True
        text, ids = thought.forced_end()
        earlier = self._segments.get(branch)
        num_new = 0 if earlier is None else len(earlier.token_ids)
        if num_new + len(ids) >= branch.tokens_left:
            self._stop_reasons[branch] = branch.find_limit_reason(self._context_of(branch))
            self._ready[branch] = self._segments.pop(branch, NOTHING)
            self._changed.set()
            return False
        has_logprobs = branch.sampling.logprobs is not None
        added = replace(NOTHING, token_ids=ids, text=text, logprobs=() if has_logprobs else None)
        self._segments[branch] = added if earlier is None else join_segments(earlier, added)
        self._thoughts[branch] = thought.inject(text, len(ids))
        if branch.ends_with_thought:
            self._stop_reasons[branch] = "step"
            self._ready[branch] = self._segments.pop(branch)
            self._changed.set()
        return not branch.ends_with_thought

    # Calls of tools.

    def _add_output(self, branch: InFlightBranch, output: Output | None) -> None:
        """Add the output of a branch's call as its next part; ``None`` if the job's time ended before the call did."""
        self._ready[branch] = self._make_output_segment(branch, output)
        self._changed.set()

    def _make_output_segment(self, branch: InFlightBranch, output: Output | None) -> Completion:
        if output is None:
            self._stop_reasons[branch] = "timeout"
            return NOTHING
        self._calls.outputs[branch] = output
        if len(output.token_ids) >= branch.tokens_left:
            self._stop_reasons[branch] = branch.find_limit_reason(self._context_of(branch))
            return NOTHING
        thought = self._thought(branch)
        assert thought is not None
        self._thoughts[branch] = thought.add_output(output.text, output.token_ids, output.next_turn)
        if output.result.is_fatal:
            self._stop_reasons[branch] = "tool"
        has_logprobs = branch.sampling.logprobs is not None
        return replace(NOTHING, token_ids=output.token_ids, text=output.text, logprobs=() if has_logprobs else None)

    # Parts.

    def _first_wave(self) -> list[InFlightBranch]:
        """Return the branches in flight of the earliest call, in the order of their paths."""
        first = min((branch.call for branch in self._reserved), default=0)
        return sorted((branch for branch in self._reserved if branch.call == first), key=lambda branch: branch.path)

    def _part(self, branch: InFlightBranch, completion: Completion) -> BranchPart:
        rate, reserved = self._reserved.rate(branch), self._reserved.pop(branch)
        spend = rate.branch_usage(
            prompt=completion.prompt_tokens,
            cached=completion.cached_tokens,
            generated=len(completion.token_ids) - self._num_injected(branch),
            drafted=completion.drafted_tokens,
            accepted=completion.accepted_tokens,
        )
        thought = self._thoughts.pop(branch, branch.thought)
        if thought is not None and branch.thought is not None:
            spend = spend.model_copy(update={"thought": thought.num_tokens - branch.thought.num_tokens})
        is_calling = self._calls.remove(branch)
        call = self._calls.outputs.pop(branch, None)
        if call is not None:
            spend = spend.model_copy(update={"tool_calls": 1, "tool_seconds": call.result.seconds})
        reason = self._stop_reasons.pop(branch, None)
        if reason is None:
            reason = branch.find_end_reason(completion, self._job_stops, self._context_of(branch))
        return BranchPart(
            branch,
            reason,
            completion.token_ids,
            branch.text_before_stop(completion, self._job_stops),
            completion.logprob,
            spend,
            reserved,
            token_confidences(completion),
            (is_calling or completion.finish_reason == "stop") and completion.token_ids[-1:] == (completion.stop,),
            completion.probe,
            thought,
            is_calling=is_calling and reason is None,
            call_ended=None if call is None else call.result.ended,
            refusal=completion.refusal,
        )

    def _context_of(self, branch: InFlightBranch) -> int:
        return self._policies[branch.parent.policy].model.context
