"""A branch in flight, from the request of a strategy to its end: one object, and a state that says where it is.

::

    waiting ──reserve──> requested ──segment that ends a part──> ready ──record──> waiting | ended
       │                  └──────┘ each segment of a part
       └──call of a tool──> in_tool ──output──> ready

A branch is generated in parts, one for each reservation of the budget, and in segments, one for each request: between
them its rules look at it. A part goes into the journal, from which a replay records it again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import gcd
from typing import Any

from engine.protocol.refusal import Refusal
from engine.protocol.types import Completion, SamplingParams, Tokens
from engine.protocol.wire import read_tokens
from reasoner.budget.prices import NO_AMOUNT, Amount, TokenRate
from reasoner.budget.usage import Usage
from reasoner.jobs.sampling_spec import Sampling
from reasoner.sandbox.cells import Ending
from reasoner.search.branch_text import BranchText
from reasoner.search.calls.runner import Output
from reasoner.search.rules.rule import Call, Continue, End, Inject, NextRequest, Rule
from reasoner.thoughts import ThoughtProgress, read_thought
from reasoner.tree import Node, Reason

SEGMENT_TOKENS = 512
"""Tokens of a branch that one engine request generates. Each further request costs about one engine step."""
NOTHING = Completion(0, (), text="", finish_reason="length", stop=None, logprob=0.0, prompt_tokens=0, cached_tokens=0)
"""A segment without tokens."""


class State(Enum):
    """State of a branch."""

    WAITING = "waiting"
    """It waits for a reservation of the budget."""
    REQUESTED = "requested"
    """The engine generates its next segment, or its rules look at the last one."""
    IN_TOOL = "in_tool"
    """The call with which it ends is running."""
    READY = "ready"
    """A part of it has arrived."""
    ENDED = "ended"
    """Its last part is in the journal."""


@dataclass(frozen=True, slots=True)
class BranchPart:
    """Part of a branch that has arrived, with its cost and the budget that was reserved for it."""

    branch: Generation
    reason: Reason | None
    """Reason for which the branch ended; ``None`` if it only used up its reservation and can be continued."""
    text: str = ""
    token_ids: Tokens = ()
    logprob: float = 0.0
    confidence: tuple[float, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    thinking: ThoughtProgress | None = None
    """Progress of the thinking after this part."""
    has_ended_turn: bool = False
    """True if the last token is an end-of-sequence token, which is no part of the text."""
    is_calling: bool = False
    """True if it ends with a call of a tool."""
    call_ended: Ending | None = None
    """End of the call whose output this part is; ``None`` for generated parts."""
    probe: float | None = None
    """Score of the policy's probe at its end."""
    refusal: Refusal | None = None
    """The server's words, if it refused the branch."""
    stop: str | None = None
    """The job's stop string with which the text ended, and which is no part of it."""
    spend: Usage = field(default_factory=Usage)
    reserved: Amount = NO_AMOUNT
    seconds: float | None = None
    """Time from its request, or the start of its call, until it was taken; ``None`` if nothing was requested."""


@dataclass(slots=True, eq=False)
class Generation:
    """A future child of a node. Its rules say how it is generated, and where it ends."""

    op: str
    path: tuple[int, ...]
    sampling: SamplingParams
    recorded: BranchText
    """Its text in the journal."""
    rules: tuple[Rule, ...] = ()
    wave: int = 0
    """Index within the stream of the call that requested the branch."""
    state: State = State.WAITING
    num_parts: int = 0
    """Number of its parts that the journal has."""
    logprob: float = 0.0
    """Log-probability of what the journal has."""
    is_calling: bool = False
    """True if it ends with a call of a tool, whose output is its next part."""
    end: dict[str, Any] | None = None
    """Journal data of the last part, once the branch has ended."""
    reservation: Amount = NO_AMOUNT
    """Budget that is held for its next part."""
    requested_at: float = 0.0
    """Working time of the job at which its next part was requested."""

    dedup_key: Hashable | None = field(init=False, default=None)
    """Key shared by branches that must be equal, since each continues the same text greedily; ``None`` for sampled
    branches."""

    # The next part.
    current: BranchText = field(init=False)
    """The text with the next part, as far as that has arrived."""
    arrived: Completion = NOTHING
    """Segments of the next part that have arrived, joined."""
    output: Output | None = None
    """Output of a tool, if the part consists of one."""
    reason: Reason | None = None
    """Reason for which the branch ends with the part."""

    def __post_init__(self) -> None:
        self.current = self.recorded
        if is_greedy(self.sampling):
            parent, max_tokens = self.parent, self.recorded.max_tokens
            sampling = replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)  # which greedy ignores
            start = parent.policy, parent.prefix, parent.solution
            self.dedup_key = self.op, start, sampling, max_tokens, self.rules

    @property
    def parent(self) -> Node:
        return self.recorded.parent

    @property
    def id(self) -> str:
        """Id of the future node."""
        return ".".join(map(str, self.path))

    @property
    def key(self) -> str:
        """Journal key of the next part."""
        return f"{self.op}:{self.id}:{self.num_parts}"

    @property
    def tokens_left(self) -> int:
        return self.current.tokens_left

    # Requests.

    @property
    def segment_tokens(self) -> int:
        """Interval of lengths at which its requests end, unless they end earlier."""
        return gcd(*(rule.every or 0 for rule in self.rules)) or SEGMENT_TOKENS

    @property
    def reads_confidence(self) -> bool:
        """True if the strategy asked for the confidence of each token."""
        return bool(self.sampling.logprobs)

    @property
    def num_generated(self) -> int:
        """Number of tokens of the next part that the engine has generated."""
        return len(self.arrived.token_ids) - (self.current.num_injected - self.recorded.num_injected)

    def count_prompt_tokens(self, tokens: int) -> int:
        """Return the prompt tokens sent by all requests that generate ``tokens`` more, one request per segment."""
        interval, sent, length = self.segment_tokens, 0, len(self.current.token_ids)
        end = length + tokens
        while length < end:
            sent += len(self.parent.prefix) + length
            length += interval - length % interval
        return sent

    def prepare_request(self) -> NextRequest | None:
        """Return the request for the tokens up to the next check or the end of the reservation.

        ``None`` if a rule has ended the branch instead, so that it is ready.
        """
        for rule in self.rules:
            self._obey(rule.before(self.current))
            if self.state is State.READY:
                return None
        self.state = State.REQUESTED
        most = min(self.reservation.tokens - self.num_generated, self.tokens_left)
        request = NextRequest(self.sampling, most)
        for rule in reversed(self.rules):
            request = rule.adapt(self.current, request)
        if request.can_be_cut:
            until_check = self.segment_tokens - len(self.current.token_ids) % self.segment_tokens
            request = replace(request, max_tokens=min(request.max_tokens, until_check))
        return request

    # Arrivals.

    async def add_segment(self, segment: Completion) -> None:
        """Add a segment and do what the rules say. The branch is ready if it ends, or if its reservation is used up."""
        self.current, segment = self.current.append_segment(segment, reads_confidence=self.reads_confidence)
        self.arrived = _join_segments(self.arrived, segment)
        for rule in self.rules:
            verdict = await rule.after(self.current, segment)
            if verdict is not None:
                segment = replace(segment, finish_reason="length", stop=None)
                self.arrived = replace(self.arrived, finish_reason="length", stop=None)
                self._obey(verdict)
            if self.state is State.READY:
                return
        if segment.finish_reason != "length":
            self.finish(segment.finish_reason)
        elif self.num_generated >= self.reservation.tokens:
            self.finish(None)

    def add_output(self, output: Output | None) -> None:
        """Add the output of the call with which it ended; ``None`` if the job's time ended before the call did."""
        self.is_calling, self.output = False, output
        if output is None:
            self.finish("timeout")
        elif len(output.token_ids) >= self.tokens_left:
            self.finish(self.current.limit_reason)
        else:
            self.current = self.current.append_output(output.text, output.token_ids, output.next_turn)
            self.arrived = replace(NOTHING, token_ids=output.token_ids, text=output.text)
            self.finish("tool" if output.result.is_fatal else None)

    def refuse(self, refusal: Refusal) -> None:
        """End the branch with a server's refusal."""
        self.arrived = replace(self.arrived, refusal=refusal)
        self.finish("refused")

    def finish(self, reason: Reason | None) -> None:
        """Make the next part ready as it is. ``reason``: why the branch ends with it; ``None`` if it can go on."""
        if reason is None and not self.arrived.token_ids:
            reason = self.current.limit_reason
        self.reason, self.state = reason, State.READY

    def _obey(self, verdict: Continue | End | Inject | Call | None) -> None:
        match verdict:
            case Inject(token_ids, text, end):
                self.current = self.current.inject(text, token_ids)
                self.arrived = replace(
                    self.arrived,
                    token_ids=self.arrived.token_ids + token_ids,
                    text=self.arrived.text + text,
                    probe=None if text else self.arrived.probe,  # it has not read this text
                )
                if end is not None:
                    self.finish(end)
            case End(reason):
                self.finish(reason)
            case Call():
                self.is_calling = True
                self.finish(None)

    # Parts.

    def make_part(self, rate: TokenRate, job_stops: Collection[str], now: float) -> BranchPart:
        """Return the part that is ready. ``job_stops``: stop strings that are not part of the text that they end.

        ``now``: working time of the job.
        """
        arrived, before, after = self.arrived, self.recorded, self.current
        text, stop = arrived.text, None
        if isinstance(arrived.stop, str) and arrived.stop in job_stops:
            stop = arrived.stop
            text = text[: max(0, after.text.find(stop) - len(before.text))]
        spend = rate.branch_usage(
            prompt=arrived.prompt_tokens,
            cached=arrived.cached_tokens,
            generated=self.num_generated,
            drafted=arrived.drafted_tokens,
            accepted=arrived.accepted_tokens,
        )
        if arrived.dropped_tokens:
            spend = spend.model_copy(update={"dropped": arrived.dropped_tokens})
        if before.thinking is not None and after.thinking is not None:
            thought = after.thinking.num_tokens - before.thinking.num_tokens
            spend = spend.model_copy(update={"thought": thought})
        if self.output is not None:
            spend = spend.model_copy(update={"tool_calls": 1, "tool_seconds": self.output.result.seconds})
        return BranchPart(
            self,
            self.reason,
            text=text,
            token_ids=arrived.token_ids,
            logprob=arrived.logprob,
            confidence=after.confidence[len(before.confidence) :],
            logprobs=None if after.logprobs is None else after.logprobs[len(before.logprobs or ()) :],
            thinking=after.thinking,
            has_ended_turn=after.has_ended_turn and bool(arrived.token_ids),
            is_calling=self.is_calling and self.reason is None,
            call_ended=None if self.output is None else self.output.result.ended,
            probe=arrived.probe,
            refusal=arrived.refusal,
            stop=stop,
            spend=spend,
            reserved=self.reservation,
            seconds=now - self.requested_at,
        )

    def make_end(self, reason: Reason) -> BranchPart:
        """Return the end of a branch that waits and gets no more."""
        return BranchPart(self, reason, thinking=self.recorded.thinking)

    def record(self, data: dict[str, Any]) -> None:
        """Record a part as the journal has it, from this attempt or an earlier one."""
        token_ids, logprobs = read_tokens(data["token_ids"], self.parent.prefix), self.recorded.logprobs
        if logprobs is not None:
            logprobs += tuple(data.get("logprobs") or [None] * len(token_ids))
        self.recorded = replace(
            self.recorded,
            token_ids=self.recorded.token_ids + token_ids,
            text=self.recorded.text + data["text"],
            confidence=self.recorded.confidence + tuple(data.get("confidence", ())),
            logprobs=logprobs,
            thinking=read_thought(self.recorded.thinking, data),
            has_ended_turn=data.get("closed", False),
        )
        self.num_parts += 1
        self.logprob += data["logprob"]
        self.discard_part()
        self.is_calling = data.get("calling", False)
        if data["reason"] is not None:
            self.end, self.state = data, State.ENDED

    def discard_part(self) -> None:
        """Go back to what the journal has."""
        self.state, self.reservation = State.WAITING, NO_AMOUNT
        self.current, self.arrived, self.output, self.reason = self.recorded, NOTHING, None, None


def make_sampling_params(
    sampling: Sampling, *, greedy: bool, stop: tuple[str, ...], logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters; those that the job leaves open have the engine's defaults."""
    params = SamplingParams(**sampling.of_engine, stop=tuple(dict.fromkeys(stop)), logprobs=logprobs)
    return replace(params, temperature=0.0) if greedy else params


def is_greedy(sampling: SamplingParams | Sampling) -> bool:
    """Return True if sampling is deterministic, so that siblings are equal."""
    return sampling.temperature == 0 or sampling.top_k == 1


def _join_segments(first: Completion, second: Completion) -> Completion:
    """Join two consecutive segments of a branch into one completion with the second one's finish reason."""
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprob=first.logprob + second.logprob,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
        logprobs=None,  # the text has the confidence of each token
        dropped_tokens=first.dropped_tokens + second.dropped_tokens,
        drafted_tokens=first.drafted_tokens + second.drafted_tokens,
        accepted_tokens=first.accepted_tokens + second.accepted_tokens,
    )
