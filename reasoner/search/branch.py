"""A branch in flight: the tokens that it has so far, and the parts in which the engine returns them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.protocol.refusal import Refusal
from engine.protocol.types import Completion, SamplingParams
from reasoner.budget.prices import NO_AMOUNT, Amount
from reasoner.budget.usage import Usage
from reasoner.confidence.token_confidence import compute_token_confidence
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.step_specs import StepRule
from reasoner.repetition import WINDOW_TOKENS, ends_in_loop
from reasoner.sandbox.cells import Ending
from reasoner.thoughts import ThoughtProgress
from reasoner.tools.calls import CallReader
from reasoner.tree import Node, Reason

SEGMENT_TOKENS = 512
"""Tokens of a branch that one engine request generates. Each further request costs about one engine step."""


NOTHING = Completion(0, (), "", "length", None, logprob=0.0, prompt_tokens=0, cached_tokens=0)
"""A segment without tokens."""


@dataclass(frozen=True, slots=True)
class PartialBranch:
    """The part of an unfinished branch beyond its parent, as a ``Watch`` gets it."""

    parent: Node
    text: str
    confidence: tuple[float, ...]
    """Confidence of each token, if the strategy asked for it."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Check of a branch whenever its length is a multiple of ``every`` tokens.

    ``verdict`` returns the reason to end the branch, or ``None``. It must depend only on its argument and on the
    strategy's state when it created the watch, so that a replay makes the same decision.
    """

    every: int
    verdict: Callable[[PartialBranch], Reason | Awaitable[Reason | None] | None]


@dataclass(slots=True, eq=False)
class InFlightBranch:
    """A future child of ``parent``, generated in one part or several."""

    op: str
    parent: Node
    path: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    """Limit of the branch's length by the model's context and the job's own limit."""
    thought: ThoughtProgress | None = None
    """State of its thought and its parts; ``None`` if the model's thoughts are not known."""
    ends_with_thought: bool = False
    """True if the branch ends, as a step, at the end of its thought."""
    steps: StepRule | None = None
    """Rule by which the branch ends as a step; ``None`` for whole solutions."""
    splits_thoughts: bool = False
    """True if the rule also applies within thoughts."""
    ends_at_limit: bool = False
    """True if ``max_tokens`` is the length of a step."""
    call: int = 0
    """Index within the stream of the call that requested the branch."""
    watch: Watch | None = None
    reader: CallReader | None = None
    """Reader of its calls of tools; ``None`` if it calls none."""
    is_calling: bool = False
    """True if it ends with a call of a tool, whose output is its next part."""
    has_ended_turn: bool = False
    """True if its last token is an end-of-sequence token."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprob: float = 0.0
    confidence: tuple[float, ...] = ()
    part: int = 0
    """Number of parts that have arrived."""
    end: dict[str, Any] | None = None
    """Journal data of the last part, once the branch has ended."""
    equality: Hashable | None = field(init=False)
    """Key shared by branches that must be equal, since each continues the same text greedily; ``None`` for sampled
    branches."""

    def __post_init__(self) -> None:
        if is_greedy(self.sampling):  # greedy sampling ignores the other parameters
            sampling = replace(self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
            limit = None if self.thought is None else self.thought.limit
            self.equality = (
                *(
                    self.op,
                    self.parent.policy,
                    self.parent.prefix,
                    self.parent.solution,
                    sampling,
                    self.max_tokens,
                    self.watch,
                ),
                *(self.ends_with_thought, limit, self.ends_at_limit, self.splits_thoughts),
            )
        else:
            self.equality = None

    @property
    def id(self) -> str:
        """Id of the future node."""
        return ".".join(map(str, self.path))

    @property
    def key(self) -> str:
        """Journal key of the next part."""
        return f"{self.op}:{self.id}:{self.part}"

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.token_ids)

    @property
    def stops_outside_thoughts(self) -> tuple[str, ...]:
        """Stop strings of ``sampling`` that do not apply within thoughts."""
        return () if self.steps is None or self.splits_thoughts else self.steps.stops

    def is_short_step(self, more: Completion, thought: ThoughtProgress | None, stop: str | int | None) -> bool:
        """Return True if this stop, at the end of an addition, does not end a step yet.

        The line breaks between a thought and the answer are no step either, nor is a part of a block that may be a
        call.
        """
        if self.reader is not None and stop in self.reader.stops:
            return True
        if self.steps is None or stop not in self.steps.stops:
            return False
        is_blank = self.thought is not None and not (self.text + more.text).strip()
        is_in_call = self.reader is not None and self.reader.is_in_call(self._find_tail(more, thought))
        num_tokens = len(self.token_ids) + len(more.token_ids)
        return is_blank or is_in_call or num_tokens < (self.steps.min_tokens or 0)

    def make_node(self, more: str = "", thought: ThoughtProgress | None = None) -> Node:
        """Return the node that it would be with this addition, as far as its text is concerned."""
        thought = thought or self.thought
        parts = () if thought is None else thought.parts
        return Node(self.path, self.parent, (), self.text + more, parts=parts)

    def _find_tail(self, more: Completion, thought: ThoughtProgress | None) -> str:
        """Return the text after the last output of a tool, with this addition."""
        return self.make_node(more.text, thought).texts_between_outputs[-1]

    @property
    def segment_tokens(self) -> int:
        """Interval of lengths at which the branch's requests end, unless they end earlier."""
        return SEGMENT_TOKENS if self.watch is None else self.watch.every

    def num_prompt_tokens(self, tokens: int) -> int:
        """Return the prompt tokens sent by all requests that generate ``tokens`` more, one request per segment."""
        sent, length, end = 0, len(self.token_ids), len(self.token_ids) + tokens
        while length < end:
            sent += len(self.parent.prefix) + length
            length += self.segment_tokens - length % self.segment_tokens
        return sent

    @property
    def num_calls(self) -> int:
        """Number of the solution's calls of tools so far."""
        return self.parent.num_calls + (0 if self.thought is None else self.thought.num_calls)

    def ends_with_call(self, more: Completion, thought: ThoughtProgress | None, job_stops: Collection[str]) -> bool:
        """Return True if, with this addition, the solution ends with a call.

        ``job_stops``: the stop strings of the job, which end no turn of the model.
        """
        if self.reader is None or more.finish_reason != "stop":
            return False
        is_delimiter = more.stop in self.reader.stops
        ends_turn = not is_delimiter and more.stop not in (*self.sampling.stop, *job_stops)
        if not is_delimiter and not ends_turn:
            return False
        return self.reader.find(self._find_tail(more, thought), ends_turn=ends_turn) is not None

    def find_end_reason(self, more: Completion, job_stops: Collection[str], context: int) -> Reason | None:
        """Return the reason for which the branch ends with its next part; ``None`` if the part can be continued.

        ``job_stops``: the stop strings of the job, which end a solution. ``context``: length of the model's context.
        """
        match more.finish_reason:
            case "stop" if more.stop in self.sampling.stop and more.stop not in job_stops:
                return "repetition" if self.ends_in_loop(more.token_ids) else "step"
            case "stop":
                return "stop"
            case "length" if len(more.token_ids) >= self.tokens_left and self.ends_at_limit:
                return "step"
            case "length" if len(more.token_ids) >= self.tokens_left or not more.token_ids:
                return self.find_limit_reason(context)
            case "length":
                return None
            case other:
                return other

    def find_limit_reason(self, context: int) -> Reason:
        """Return the reason of the branch if it has all the tokens that it may have."""
        return "length" if self.max_tokens < context - len(self.parent.prefix) else "context"

    def text_before_stop(self, more: Completion, job_stops: Collection[str]) -> str:
        """Return an addition's text without a stop string of the job that ended it, and what follows in its last
        token."""
        if more.stop not in job_stops:
            return more.text
        end = (self.text + more.text).find(str(more.stop))
        return more.text[: max(0, end - len(self.text))]

    def find_constraint_start(self, thought: ThoughtProgress | None, num_tokens: int) -> int:
        """Return where the constrained text of its first ``num_tokens`` begins: after its conversation's thought."""
        num_answer = len(self.parent.written) + num_tokens
        if thought is not None:
            above = sum(node.count_tokens("answer") for node in self.parent.lineage())
            num_answer = above + sum(part.num_tokens for part in thought.parts if part.kind == "answer")
        return len(self.parent.prefix) + num_tokens - num_answer

    def ends_in_loop(self, more: tuple[int, ...]) -> bool:
        """Return True if the solution, with these tokens appended to the branch, ends in a loop."""
        tokens = self.token_ids + more
        if len(tokens) < WINDOW_TOKENS:
            tokens = self.parent.written + tokens
        return ends_in_loop(tokens)

    async def find_stop_reason(self, more: Completion) -> Reason | None:
        """Return the reason to end the branch after this addition, or ``None`` to continue."""
        if self.ends_in_loop(more.token_ids):
            return "repetition"
        length = len(self.token_ids) + len(more.token_ids)
        if self.watch is None or length % self.watch.every:
            return None
        confidence = self.confidence + token_confidences(more)
        verdict = self.watch.verdict(PartialBranch(self.parent, self.text + more.text, confidence))
        return await verdict if isinstance(verdict, Awaitable) else verdict


@dataclass(frozen=True, slots=True)
class BranchPart:
    """Part of a branch that has arrived, with its cost and the budget that was reserved for it."""

    branch: InFlightBranch
    reason: Reason | None
    """Reason for which the branch ended; ``None`` if it only used up its reservation and can be continued."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprob: float = 0.0
    spend: Usage = field(default_factory=Usage)
    reserved: Amount = NO_AMOUNT
    confidence: tuple[float, ...] = ()
    closed: bool = False
    """True if the last token is an end-of-sequence token, which is no part of the text."""
    probe: float | None = None
    """Score of the policy's probe at its end."""
    thought: ThoughtProgress | None = None
    """State of the thought after this part."""
    is_calling: bool = False
    """True if it ends with a call of a tool."""
    call_ended: Ending | None = None
    """End of the call whose output this part is; ``None`` for generated parts."""
    refusal: Refusal | None = None
    """The server's words, if it refused the branch."""


def make_sampling_params(
    sampling: Sampling, *, greedy: bool, stop: tuple[str, ...], logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters; those that the job leaves open have the engine's defaults."""
    given = sampling.model_dump(exclude_none=True, exclude={"max_tokens", "thinking_tokens"})
    params = SamplingParams(**given, stop=tuple(dict.fromkeys(stop)), logprobs=logprobs)
    return replace(params, temperature=0.0) if greedy else params


def is_greedy(sampling: SamplingParams | Sampling) -> bool:
    """Return True if sampling is deterministic, so that siblings are equal."""
    return sampling.temperature == 0 or sampling.top_k == 1


def join_segments(first: Completion, second: Completion) -> Completion:
    """Join two consecutive segments of a branch into one completion with the second one's finish reason."""
    logprobs = None if second.logprobs is None else (*(first.logprobs or ()), *second.logprobs)
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprob=first.logprob + second.logprob,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
        logprobs=logprobs,
        drafted_tokens=first.drafted_tokens + second.drafted_tokens,
        accepted_tokens=first.accepted_tokens + second.accepted_tokens,
    )


def token_confidences(completion: Completion) -> tuple[float, ...]:
    """Return the confidence of each token; empty if the request had no top log-probabilities."""
    return tuple(compute_token_confidence(token) for token in completion.logprobs or ())
