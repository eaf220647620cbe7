"""The text of a branch beyond its parent, as an immutable value that rules and monitors look at."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from engine.protocol.types import Completion, Tokens
from reasoner.confidence.token_confidence import compute_token_confidence
from reasoner.repetition import WINDOW_TOKENS, ends_in_loop
from reasoner.thoughts import UNKNOWN, ThoughtProgress
from reasoner.tree import LEAST_LOGPROB, Node, Part, Reason

LOGPROB_DIGITS = 6
"""Decimals of log-probabilities in a journal: about the precision of a 32-bit float."""


@dataclass(frozen=True, slots=True)
class BranchText:
    """A branch's text and tokens beyond its parent, and where its thinking is at their end."""

    parent: Node
    max_tokens: int
    """Limit of the branch's length."""
    limit_reason: Reason = "length"
    """Reason of a branch that has all the tokens that it may have."""
    thinking: ThoughtProgress | None = None
    """Progress of the thinking, with the parts of the text; ``None`` for a model that is not known to think, as long as
    all of the text is generated."""
    token_ids: Tokens = ()
    text: str = ""
    confidence: tuple[float, ...] = ()
    """Confidence of each generated token, if the strategy asked for it."""
    logprobs: tuple[float | None, ...] | None = None
    """Log-probability of each token, ``None`` for one that was not generated or of which the server reported none;
    ``None`` if the job does not record them."""
    has_ended_turn: bool = False
    """True if the last token is an end-of-sequence token, which is no part of the text."""

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.token_ids)

    @property
    def num_injected(self) -> int:
        """Number of tokens that were not generated."""
        return 0 if self.thinking is None else self.thinking.num_injected

    @property
    def num_calls(self) -> int:
        """Number of the solution's calls of tools so far."""
        return self.parent.num_calls + (0 if self.thinking is None else self.thinking.num_calls)

    @property
    def position(self) -> int:
        """Position of the next token in its prompt."""
        return len(self.parent.prefix) + len(self.token_ids)

    @property
    def answer_position(self) -> int:
        """Position of the first token of the answer in its prompt, after the thinking of its conversation."""
        num_answer = len(self.parent.completion_ids) + len(self.token_ids)
        if self.thinking is not None:
            above = sum(node.count_tokens("answer") for node in self.parent.lineage())
            num_answer = above + sum(part.num_tokens for part in self.thinking.parts if part.kind == "answer")
        return self.position - num_answer

    @property
    def is_in_loop(self) -> bool:
        """True if the solution ends in a loop."""
        is_enough = len(self.token_ids) >= WINDOW_TOKENS
        return ends_in_loop(self.token_ids if is_enough else self.parent.completion_ids + self.token_ids)

    @property
    def texts_between_outputs(self) -> list[str]:
        """The solution's texts before, between and after the outputs of tools (``Node.texts_between_outputs``)."""
        parts = () if self.thinking is None else self.thinking.parts
        return Node(self.parent.path, self.parent, (), self.text, parts=parts).texts_between_outputs

    def append_segment(self, segment: Completion, *, reads_confidence: bool) -> tuple[BranchText, Completion]:
        """Return the text after a generated segment, and the segment without the stop that only ended a thought."""
        thinking = self.thinking
        if thinking is not None:
            written = self.parent.completion_ids + self.token_ids
            num_turn = sum(part.num_tokens for part in thinking.turn_parts)
            thinking, segment = thinking.add(segment, written[max(0, len(written) - num_turn) :])
        text = replace(
            self,
            thinking=thinking,
            token_ids=self.token_ids + segment.token_ids,
            text=self.text + segment.text,
            confidence=self.confidence
            + tuple(compute_token_confidence(token) for token in (reads_confidence and segment.logprobs) or ()),
            logprobs=self._extend_logprobs(_read_logprobs(segment)),
            has_ended_turn=segment.finish_reason == "stop" and segment.token_ids[-1:] == (segment.stop,),
        )
        return text, segment

    def inject(self, text: str, token_ids: Tokens) -> BranchText:
        """Return the text after one that the search adds."""
        return self._append(text, token_ids, self._split_parts().inject(text, len(token_ids)))

    def append_output(self, text: str, token_ids: Tokens, next_turn: Tokens) -> BranchText:
        """Return the text after a tool's output. ``next_turn``: its last tokens, if the model's next turn begins."""
        return self._append(text, token_ids, self._split_parts().add_output(text, token_ids, next_turn))

    def _append(self, text: str, token_ids: Tokens, thinking: ThoughtProgress) -> BranchText:
        return replace(
            self,
            thinking=thinking,
            token_ids=self.token_ids + token_ids,
            text=self.text + text,
            logprobs=self._extend_logprobs((None,) * len(token_ids)),
            has_ended_turn=self.has_ended_turn and not token_ids,
        )

    def _extend_logprobs(self, more: Sequence[float | None]) -> tuple[float | None, ...] | None:
        return None if self.logprobs is None else (*self.logprobs, *more)

    def _split_parts(self) -> ThoughtProgress:
        """Return the thinking; of a model that is not known to think, parts that tell who wrote what."""
        if self.thinking is not None:
            return self.thinking
        generated = (Part("answer", "generated", len(self.text), len(self.token_ids)),) if self.token_ids else ()
        return ThoughtProgress(UNKNOWN, "closed", parts=generated)


def _read_logprobs(segment: Completion) -> list[float | None]:
    """Return the log-probabilities of a segment's tokens; ``None`` for all of them if the server left some out."""
    tokens = segment.logprobs or ()
    if len(tokens) != len(segment.token_ids):
        return [None] * len(segment.token_ids)
    return [round(max(token.logprob, LEAST_LOGPROB), LOGPROB_DIGITS) for token in tokens]


@dataclass(frozen=True, slots=True)
class StreamMonitor:
    """A strategy's check of a branch whenever its length is a multiple of ``every`` tokens.

    ``check`` returns the reason to end the branch, or ``None``. It must depend only on its argument and on the
    strategy's state when it created the monitor, so that a replay makes the same decision.
    """

    every: int
    check: Callable[[BranchText], Reason | Awaitable[Reason | None] | None]
