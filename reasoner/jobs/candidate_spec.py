"""Candidates: the client's own solutions, which a job ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from prm.formats.base import render_message
from reasoner.jobs.messages import MAX_MESSAGES, Message, Text

MAX_N = 4096
"""Bound of the number of solutions; a service has its own, the setting ``limits.n``."""


def _check_conversation(value: list[Message]) -> list[Message]:
    if value[-1].role not in ("assistant", "tool"):
        raise ValueError(
            "a candidate that is a conversation ends with a message of the assistant, its answer or its calls, or with "
            "the result of a call"
        )
    return value


_Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_check_conversation)]
Candidate = Text | _Messages
Candidates = Annotated[list[Candidate], Field(min_length=1, max_length=MAX_N)]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a candidate's text: a label, the assistant's words or calls, or the words of others.

    ``message`` is the index of its message.
    """

    text: str
    kind: Literal["label", "words", "calls", "other", "output"]
    message: int = 0


def read_candidate(candidate: str | list[Message], asked: str) -> list[Piece]:
    """Return a candidate's text in pieces; ``asked``: the question, which is left out."""
    if isinstance(candidate, str):
        return [Piece(candidate, "words")]
    if candidate[0].role == "user" and candidate[0].content == asked and len(candidate) > 1:
        candidate = candidate[1:]
    if len(candidate) == 1 and not candidate[0].tool_calls:
        return [Piece(candidate[0].content or "", "words")]
    pieces: list[Piece] = []
    for index, message in enumerate(candidate):
        words = message.content or ""
        kind: Literal["words", "output", "other"]
        kind = "words" if message.role == "assistant" else "output" if message.role == "tool" else "other"
        blank = "\n\n" if pieces else ""
        pieces += [Piece(f"{blank}{message.role.title()}: ", "label", index), Piece(words, kind, index)]
        if message.tool_calls:
            calls = render_message(message.render() | {"content": ""})
            pieces.append(Piece(f"\n{calls}" if words else calls, "calls", index))
    return pieces
