"""Token ids for servers that report none: numbers that hold the text itself.

A search identifies a branch by its token ids and counts them against budgets. Here an id is a piece of UTF-8 text, so
that ids alone, without any state, give back the conversation, its template's variables and the beginning of its answer.
The number of ids of an answer is the number of tokens that the server bills. The ids of a thought are marked, so that
it is not sent again, whatever it quotes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.protocol.thoughts import DELIMITERS, find_thought
from engine.protocol.types import Prompt, TemplateKwargs, Tokens

OPENING, CLOSING = DELIMITERS[0]
"""The delimiters of thoughts that a server sends apart from its content."""
_MARK = b"\x01"
"""First byte of each id, so that leading zeros and empty pieces are kept."""
_THOUGHT_MARK = b"\x02"
"""First byte of the ids of thoughts."""
_ANSWER = b"\0"
"""Separates messages, whose JSON has no such byte, from the beginning of the answer."""
BYTES_PER_TOKEN = 4
"""The usual number in English text, by which the tokens of a prompt are estimated."""
MAX_BYTES_PER_TOKEN = 32
"""The most that are possible on the average of a text, whatever the server reports."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a conversation, and the beginning of its answer."""

    messages: list[dict[str, Any]]
    template_kwargs: TemplateKwargs = field(default_factory=dict)
    written: str = ""
    """All that is written of the answer, its thought included."""
    answer: str = ""
    """The same after the thought."""

    @property
    def has_open_thought(self) -> bool:
        """True if there is a thought whose end the server has not sent."""
        thought = self.written.removesuffix(self.answer)
        span = find_thought(thought)
        return bool(thought) and not (span is not None and span.is_closed)


def encode_prompt(text: Prompt, template_kwargs: TemplateKwargs | None = None) -> Tokens:
    """Return the ids of a plain text or of chat messages, to which an answer can be appended."""
    if isinstance(text, str):
        return encode_text(text)
    value = {"messages": list(text), "chat_template_kwargs": template_kwargs} if template_kwargs else list(text)
    return _encode(json.dumps(value, ensure_ascii=False).encode() + _ANSWER, None)


def encode_text(text: str, count: int | None = None, *, is_thought: bool = False) -> Tokens:
    """Return the ids of a text: ``count`` of them, or one for each ``BYTES_PER_TOKEN`` bytes."""
    return _encode(text.encode(), count, _THOUGHT_MARK if is_thought else _MARK)


def measure_thought(tokens: Sequence[int]) -> tuple[int, int]:
    """Return the number of characters and of ids of the thought with which an answer begins."""
    pieces = [piece for mark, piece in map(_split, tokens) if mark == _THOUGHT_MARK]
    return len(b"".join(pieces).decode(errors="replace")), len(pieces)


def count_tokens(text: str, reported: int | None) -> int:
    """Return the number of tokens to bill for a text: the reported one, if that is possible."""
    if reported is None:
        return -(-len(text.encode()) // BYTES_PER_TOKEN)
    return max(reported, _least_tokens(text))


def encode_answer(thought: str, answer: str, reported: int | None, reported_thought: int | None = None) -> Tokens:
    """Return the ids of an answer after its thought: as many as the server bills, if that is possible.

    ``reported_thought``: those of the thought among them, by the server; otherwise their share is that of the text.
    """
    least_thought, least_answer = _least_tokens(thought), _least_tokens(answer)
    total = max(count_tokens(thought + answer, reported), least_thought + least_answer)
    size = len(thought.encode())
    if not reported_thought:  # some servers report none whatever the model thinks
        reported_thought = round(total * size / max(1, size + len(answer.encode())))
    num_thought = max(least_thought, min(reported_thought, total - least_answer))
    return encode_text(thought, num_thought, is_thought=True) + encode_text(answer, total - num_thought)


def decode_text(tokens: Sequence[int]) -> str:
    """Return the text of ids."""
    return b"".join(_split(token)[1] for token in tokens).decode(errors="replace")


def decode_prompt(tokens: Sequence[int]) -> Conversation:
    """Return the conversation that ids hold. A plain text counts as one message of the user."""
    pieces = [_split(token) for token in tokens]
    head, separator, written = b"".join(piece for _, piece in pieces).partition(_ANSWER)
    if not separator:
        return Conversation([{"role": "user", "content": head.decode(errors="replace")}])
    value = json.loads(head)
    if isinstance(value, list):
        value = {"messages": value, "chat_template_kwargs": {}}
    length = 0
    for mark, piece in reversed(pieces):
        if mark == _THOUGHT_MARK and piece:
            break
        length += len(piece)
    answer = written[max(0, len(written) - length) :]
    return Conversation(
        value["messages"],
        value["chat_template_kwargs"],
        written.decode(errors="replace"),
        answer.decode(errors="replace"),
    )


def _least_tokens(text: str) -> int:
    """Return the smallest number of tokens that a text can have."""
    return -(-len(text.encode()) // MAX_BYTES_PER_TOKEN)


def _encode(data: bytes, count: int | None, mark: bytes = _MARK) -> Tokens:
    """Return ids of pieces of equal size; where there are fewer bytes than ids, the first ones are empty."""
    if count is None:
        count = -(-len(data) // BYTES_PER_TOKEN)
    ends = [len(data) * index // count for index in range(count + 1)] if count else []
    return tuple(int.from_bytes(mark + data[start:end], "big") for start, end in itertools.pairwise(ends))


def _split(token: int) -> tuple[bytes, bytes]:
    """Return the mark of an id and its piece of text."""
    data = token.to_bytes((token.bit_length() + 7) // 8, "big")
    return data[:1], data[1:]
