"""Thoughts: the part of a solution that a thinking model writes between delimiters before its answer.

A conversation begins ``undecided``: its prompt neither opens a thought nor holds an empty one. The state becomes
``open`` where the model opens its thought, or the prompt does, and ``closed`` after the first closing delimiter, or as
soon as the model answers without a thought. Later delimiters are text of the answer, unless the output of a tool has
ended the model's turn: in its next one it may think again. If the end of a thought is a token
of its own, only that token ends it: a quotation of the delimiter, spelled by other tokens, does not.

A server that only chats has no tokens: it tells which part of an answer is a thought, and closes thoughts itself.
Where nobody tells, as in solutions that a client brings, the text is read (``engine.protocol.thoughts``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.protocol.thoughts import DELIMITERS, Delimiters
from engine.protocol.types import Completion, Token, Tokens
from reasoner.tree import Part, PartKind, ThoughtState, find_turn, read_parts


def strip_delimiters(thought: str, own: Delimiters | None = None) -> str:
    """Return the text of a thought without its delimiters: a model's ``own``, else those of public models."""
    text = thought.strip()
    for opening, closing in (*((own,) if own else ()), *DELIMITERS):
        text = text.removeprefix(opening).removesuffix(closing)
    return text.strip()


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The delimiters of a model's thoughts, as texts and as tokens."""

    opening: str
    closing: str
    opening_ids: Tokens
    closing_ids: Tokens
    forced: str
    """The text that closes a thought at its limit."""
    forced_ids: Tokens
    blank_ids: frozenset[Token]
    """The tokens of line breaks, which a template may write after a delimiter."""
    has_end_token: bool
    """True if the first of ``closing_ids`` ends every thought, and nothing else contains it."""
    is_told: bool = False
    """True if the server tells which part of an answer is a thought."""

    @property
    def end_token(self) -> int | None:
        token = self.closing_ids[0] if self.has_end_token else None
        return token if isinstance(token, int) else None

    @property
    def rest_ids(self) -> Tokens:
        """The tokens of the closing delimiter after the one that ends a thought, which are injected."""
        return self.closing_ids[1:] if self.has_end_token else ()

    def find_state(self, prompt: Tokens) -> ThoughtState:
        """Return the state at the end of a prompt: that of its last delimiter, if only line breaks follow it."""
        end = len(prompt)
        while end and prompt[end - 1] in self.blank_ids:
            end -= 1
        if prompt[max(0, end - len(self.opening_ids)) : end] == self.opening_ids:
            return "open"
        return "closed" if prompt[max(0, end - len(self.closing_ids)) : end] == self.closing_ids else "undecided"


UNKNOWN = ThoughtFormat(
    "", "", opening_ids=(), closing_ids=(), forced="", forced_ids=(), blank_ids=frozenset(), has_end_token=False
)
"""Format of a model whose thoughts are not known. A branch with tools has parts all the same."""


@dataclass(frozen=True, slots=True)
class ThoughtProgress:
    """Position of a branch relative to its thought: before it, in it, or after it.

    ``num_tokens``: generated tokens of the thought so far, in the whole conversation.
    """

    format: ThoughtFormat
    state: ThoughtState
    num_tokens: int = 0
    parts: tuple[Part, ...] = ()
    """The parts of the branch."""
    above: tuple[Part, ...] = ()
    """The parts of the model's current turn before the branch."""

    @property
    def can_begin_answer(self) -> bool:
        """True if the next token may be one of the answer."""
        return self.state == "closed" or self._is_at_start

    @property
    def _is_at_start(self) -> bool:
        """True if the model may open a thought with its next token."""
        has_begun = any(part.kind == "thought" and part.origin == "generated" for part in self.turn_parts)
        return self.state == "undecided" and not has_begun

    @property
    def turn_parts(self) -> tuple[Part, ...]:
        """The parts of the model's current turn."""
        start = find_turn(self.parts)
        return self.parts[start:] if start else self.above + self.parts

    @property
    def has_just_closed(self) -> bool:
        """True if the branch ends with the end of its thought."""
        return self.state == "closed" and bool(self.parts) and self.parts[-1].kind == "thought"

    @property
    def is_known(self) -> bool:
        """True if the delimiters of the model's thoughts are known."""
        return self.format is not UNKNOWN

    @property
    def num_injected(self) -> int:
        """Number of the branch's tokens that were not generated."""
        return sum(part.num_tokens for part in self.parts if part.origin != "generated")

    @property
    def num_calls(self) -> int:
        """Number of the branch's calls of tools."""
        return sum(part.origin == "tool" for part in self.parts)

    def add(self, segment: Completion, earlier: Tokens) -> tuple[ThoughtProgress, Completion]:
        """Return the progress after a segment, and the segment as if a closing delimiter had not stopped it.

        The delimiter is then in its text. ``earlier``: the tokens of the model's current turn before the segment.
        """
        if self.format.is_told:
            return self._add_told(segment), segment
        if self.state == "closed":
            return self._append("answer", segment), segment
        state = self._decide(earlier + segment.token_ids)
        is_end = self._is_at_end(segment)
        if is_end:
            text = segment.text if segment.text.endswith(self._end_text) else segment.text + self._end_text
            segment = replace(segment, text=text, finish_reason="length", stop=None)
        closes = is_end and state == "open"  # else it is a delimiter of an answer that no thought precedes
        if state == "closed":
            return replace(self._append("answer", segment), state=state), segment
        num_tokens = self.num_tokens + len(segment.token_ids)
        progress = self._append("thought", segment)
        return replace(progress, state="closed" if closes else state, num_tokens=num_tokens), segment

    def _add_told(self, segment: Completion) -> ThoughtProgress:
        """Return the progress after a segment, of which the server has told the part that is a thought."""
        num_chars, num_tokens = segment.thought or (0, 0)
        rest_chars, rest_tokens = len(segment.text) - num_chars, len(segment.token_ids) - num_tokens
        thought = Part("thought", "generated", num_chars, num_tokens)
        answer = Part("answer", "generated", rest_chars, rest_tokens)
        state = self.state
        if rest_chars:
            state = "closed"
        elif num_tokens and state == "undecided":
            state = "open"
        return replace(
            self, state=state, num_tokens=self.num_tokens + num_tokens, parts=_join(self.parts, thought, answer)
        )

    def _is_at_end(self, segment: Completion) -> bool:
        """Return True if the closing delimiter has stopped this segment."""
        end = self.format.closing if self.format.end_token is None else self.format.end_token
        return self.state != "closed" and segment.finish_reason == "stop" and segment.stop == end

    def inject(self, text: str, num_tokens: int) -> ThoughtProgress:
        """Return the progress after injected text, which closes the thought if it contains the closing delimiter."""
        if self.state != "closed" and self.format.closing in text:
            length = text.index(self.format.closing) + len(self.format.closing)
            parts = [Part("thought", "injected", length, num_tokens), Part("answer", "injected", len(text) - length, 0)]
            return replace(self, state="closed", parts=_join(self.parts, *parts))
        opens = self.state == "undecided" and text.lstrip().startswith(self.format.opening)
        kind: PartKind = "thought" if opens or self.state == "open" else "answer"
        state: ThoughtState = "open" if opens else self.state
        return replace(self, state=state, parts=_join(self.parts, Part(kind, "injected", len(text), num_tokens)))

    def add_output(self, text: str, output: Tokens, next_turn: Tokens = ()) -> ThoughtProgress:
        """Return the progress after the output of a tool, which opens and closes nothing within a turn of the model.

        ``next_turn``: the last of its tokens, if they begin the model's next turn, in which it may think again.
        """
        kind: PartKind = "answer" if self.can_begin_answer else "thought"
        state: ThoughtState = "closed" if kind == "answer" else "open"
        if next_turn and self.is_known:
            state = self.format.find_state(output)
        parts = Part(kind, "tool", len(text), len(output) - len(next_turn)), Part(kind, "injected", 0, len(next_turn))
        return replace(self, state=state, parts=_join(self.parts, *parts))

    def make_forced_end(self) -> tuple[str, Tokens]:
        """Return the text and the tokens that close the thought now."""
        text, ids = self.format.forced, self.format.forced_ids
        if self._is_at_start:
            return self.format.opening + text, self.format.opening_ids + ids
        return text, ids

    @property
    def _end_text(self) -> str:
        return self.format.closing if len(self.format.closing_ids) == 1 or not self.format.has_end_token else ""

    def _decide(self, written: Tokens) -> ThoughtState:
        if self.state == "open":
            return "open"
        opening = self.format.opening_ids
        if written[: len(opening)] == opening:
            return "open"
        return "undecided" if opening[: len(written)] == written else "closed"

    def _append(self, kind: PartKind, segment: Completion) -> ThoughtProgress:
        part = Part(kind, "generated", len(segment.text), len(segment.token_ids))
        return replace(self, parts=_join(self.parts, part))


def _join(parts: tuple[Part, ...], *more: Part) -> tuple[Part, ...]:
    """Return all parts, with neighbours of one kind and origin as one."""
    joined = list(parts)
    for part in more:
        if not part.num_chars and not part.num_tokens:
            continue
        if joined and (joined[-1].kind, joined[-1].origin) == (part.kind, part.origin):
            last = joined.pop()
            part = replace(
                part, num_chars=last.num_chars + part.num_chars, num_tokens=last.num_tokens + part.num_tokens
            )
        joined.append(part)
    return tuple(joined)


def describe_thought(progress: ThoughtProgress) -> dict[str, Any]:
    """Return the parts of a branch so far, and its thought if it is known, for the journal."""
    parts = [[part.kind, part.origin, part.num_chars, part.num_tokens] for part in progress.parts]
    thought = {"thought": {"state": progress.state, "tokens": progress.num_tokens}} if progress.is_known else {}
    return {"parts": parts} | thought


def read_thought(progress: ThoughtProgress | None, data: Mapping[str, Any]) -> ThoughtProgress | None:
    """Return the progress after an entry of the journal."""
    if "parts" not in data:
        return progress
    progress = progress or ThoughtProgress(UNKNOWN, "closed")
    thought = data.get("thought", {"state": progress.state, "tokens": progress.num_tokens})
    return replace(progress, state=thought["state"], num_tokens=thought["tokens"], parts=read_parts(data))
