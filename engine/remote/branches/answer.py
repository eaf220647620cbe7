"""The part of a branch that a server has sent so far, and the words with which servers end one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.protocol.refusal import Refusal
from engine.protocol.types import Branch, EngineUnavailable, FinishReason, Tokens
from engine.protocol.wire import Json
from engine.remote.connection import not_a_completion

_END_REASONS: dict[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "completed"), "stop"),
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use", "function_call"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "model_length", "pause_turn"), "length"),
    **dict.fromkeys(("model_context_window_exceeded", "error_limit"), "context"),
    **dict.fromkeys(("content_filter", "content_filtered", "sensitive", "safety", "image_safety"), "refused"),
    **dict.fromkeys(("refusal", "prohibited_content", "blocklist", "spii", "recitation"), "refused"),
    **dict.fromkeys(("guardrail_intervened", "error_toxic"), "refused"),
}
"""The reasons of OpenAI, and of servers that pass on Anthropic's, Google's, Amazon's and Cohere's, in small letters.

Words of a failure, such as vLLM's "abort" and "error", are none: the same request may succeed.
"""

_OTHER_FORMS = (AttributeError, KeyError, IndexError, TypeError, ValueError)
"""Exceptions in reading an answer of another form than OpenAI's."""


@dataclass
class Answer(ABC):
    """The text and tokens of one branch, from one request or, after interruptions, from several."""

    index: int
    """The place of the branch in the caller's request."""
    branch: Branch
    reason: FinishReason | None = None
    """``None`` until the server has ended the branch."""
    refusal: Refusal | None = None
    """The reason of a server that has refused it."""
    stop: str | int | None = None
    cached: int = 0
    has_choices: bool = False

    @property
    @abstractmethod
    def token_ids(self) -> Tokens:
        """The tokens received."""

    @property
    @abstractmethod
    def num_left(self) -> int:
        """The number of tokens that a request may still add."""

    def take(self, choice: Json, source: str) -> str:
        """Add a choice of an event and return its text.

        Raises ``EngineUnavailable`` for one of another form than OpenAI's, which names the server as ``source``.
        """
        self.has_choices = True
        try:  # for every token, and several times as fast as the context manager
            return self._take_choice(choice, source)
        except _OTHER_FORMS as error:
            raise not_a_completion(source, f"{type(error).__name__}: {error}") from error

    def take_usage(self, usage: Json, source: str) -> None:
        """Add what the server reports about the request, whose last branch this is. Raises as ``take``."""
        with refusing_other_forms(source):
            self._take_usage(usage)

    def check_end(self, source: str, other_fields: Collection[str]) -> None:
        """Raise ``EngineUnavailable`` for an answer that is not finished.

        ``other_fields``: the fields of events without any choice.
        """
        if self.reason is not None:
            return
        if not self.has_choices:
            fields = ", ".join(sorted(map(repr, other_fields))) or "nothing"
            raise not_a_completion(source, f"it has no 'choices', but {fields}")
        raise EngineUnavailable(f"{source} ended its answer in the middle of a text")

    @abstractmethod
    def _take_choice(self, choice: Json, source: str) -> str: ...

    @abstractmethod
    def _take_usage(self, usage: Json) -> None: ...

    def _end(self, finish: str) -> None:
        """Record the end of the branch by a server's word. Raises ``EngineUnavailable`` if it names no end."""
        self.reason = find_end_reason(finish)
        if self.reason is None:
            raise EngineUnavailable(f"the server ended an answer with {finish!r}")
        if self.reason == "refused":
            self.refusal = Refusal(f"the server ended the answer with {finish!r}", kind="filtered")


@contextmanager
def refusing_other_forms(source: str) -> Iterator[None]:
    """Raise ``EngineUnavailable``, which names the server, where an answer has another form than OpenAI's."""
    try:
        yield
    except _OTHER_FORMS as error:
        raise not_a_completion(source, f"{type(error).__name__}: {error}") from error


def read_finish(choice: Json) -> str | None:
    """Return the word with which a server ended a choice; ``None`` for one that goes on, which some call "null"."""
    finish = choice.get("finish_reason")
    return None if finish in (None, "", "null") else str(finish)


def find_end_reason(finish: str) -> FinishReason | None:
    """Return the reason for a server's word; ``None`` if it names no end of an answer."""
    return _END_REASONS.get(finish.lower())


def read_choices(chunk: Json, source: str) -> list[Json]:
    """Return the choices of an event, none if it has none. Raises ``EngineUnavailable`` for ones of another form."""
    if not isinstance(chunk.get("usage") or {}, dict):
        raise not_a_completion(source, "its 'usage' is no object")
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise not_a_completion(source, "its 'choices' are no list of objects")
    return choices
