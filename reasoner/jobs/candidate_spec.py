"""Candidates: the client's own solutions, which a job ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from reasoner.jobs.messages import Message, Text

MAX_N = 256
"""Maximum number of solutions."""


def _check_conversation(value: list[Message]) -> list[Message]:
    if value[-1].role != "assistant" or not value[-1].content:
        raise ValueError("a candidate that is a conversation ends with a message of the assistant, its answer")
    return value


Candidate = Text | Annotated[list[Message], Field(min_length=1, max_length=64), AfterValidator(_check_conversation)]
Candidates = Annotated[list[Candidate], Field(min_length=1, max_length=MAX_N)]


def read_candidate(candidate: str | list[Message], asked: str) -> tuple[str, str]:
    """Return a candidate's text, and the part that states its answer: its last message. ``asked``: the question."""
    if isinstance(candidate, str):
        return candidate, candidate
    answer = candidate[-1].content or ""
    if candidate[0].role == "user" and candidate[0].content == asked:
        candidate = candidate[1:]
    if len(candidate) == 1:
        return answer, answer
    return "\n\n".join(f"{message.role.title()}: {message.content}" for message in candidate), answer
