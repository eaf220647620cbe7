"""Candidates: the client's own solutions, which a job ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from reasoner.jobs.messages import MAX_MESSAGES, Message, Text

MAX_N = 4096
"""Bound of the number of solutions; a service has its own, the setting ``limits.n``."""


def _check_conversation(value: list[Message]) -> list[Message]:
    if value[-1].role != "assistant" or not value[-1].content:
        raise ValueError("a candidate that is a conversation ends with a message of the assistant, its answer")
    return value


_Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_check_conversation)]
Candidate = Text | _Messages
Candidates = Annotated[list[Candidate], Field(min_length=1, max_length=MAX_N)]


def read_candidate(candidate: str | list[Message], asked: str) -> list[tuple[str, bool]]:
    """Return a candidate's text in pieces. Those that the assistant wrote, as the last one, are marked with True.

    ``asked``: the question, which is left out.
    """
    if isinstance(candidate, str):
        return [(candidate, True)]
    if candidate[0].role == "user" and candidate[0].content == asked:
        candidate = candidate[1:]
    if len(candidate) == 1:
        return [(candidate[0].content or "", True)]
    pieces: list[tuple[str, bool]] = []
    for message in candidate:
        blank = "\n\n" if pieces else ""
        pieces += [(f"{blank}{message.role.title()}: ", False), (message.content or "", message.role == "assistant")]
    return pieces
