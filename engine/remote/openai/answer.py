"""The part of a branch that an OpenAI-compatible server has sent so far."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.protocol.refusal import Refusal
from engine.protocol.types import Branch, EngineError, EngineUnavailable, FinishReason, TokenLogprob, Tokens
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

_END_OF_TURN = re.compile(
    r"(<\|(im_end|eot_id|eom_id|end_of_text|endoftext|return|call)\|>|</s>|<\uff5cend\u2581of\u2581sentence\uff5c>)$"
)
"""The texts of public models' end-of-sequence tokens."""


@dataclass
class Answer:
    """The text and tokens of one branch, from one request or, after interruptions, from several."""

    index: int
    """The place of the branch in the caller's request."""
    branch: Branch
    text: str = ""
    ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    refusal: Refusal | None = None
    """The reason of a server that has refused it."""
    stop: str | int | None = None
    logprob: float | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    untokenized: str = ""
    """The last part of the text, for which the server sent no token ids."""
    cached: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def rest(self) -> Branch:
        """The branch that continues after what has arrived."""
        received = tuple(self.ids)
        left = self.branch.max_tokens - len(received)
        return replace(self.branch, generated=self.branch.generated + received, max_tokens=left)

    def take(self, choice: Json, stops: tuple[str, ...], source: str) -> str:
        """Add a choice of an event and return its text. ``stops``: the request's stop strings.

        Raises ``EngineError`` for more tokens than were asked for, and ``EngineUnavailable`` for a choice of another
        form than OpenAI's, which names the server as ``source``.
        """
        try:
            return self._take(choice, stops)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise not_a_completion(source, f"{type(error).__name__}: {error}") from error

    def _take(self, choice: Json, stops: tuple[str, ...]) -> str:
        text: str = choice.get("text") or ""
        logprobs = choice.get("logprobs") or {}
        if choice.get("token_ids") is None:
            self.untokenized += text
        self.ids += choice.get("token_ids") or ()
        if len(self.ids) > self.branch.max_tokens:
            raise EngineError(
                f"the server sent {len(self.ids)} tokens where at most {self.branch.max_tokens} were asked for"
            )
        values = logprobs.get("token_logprobs")
        if values is not None:
            self.logprob = (self.logprob or 0.0) + math.fsum(value for value in values if value is not None)
        self._take_logprobs(choice.get("token_ids") or (), logprobs)
        finish = read_finish(choice)
        if finish is not None:
            self.reason = find_end_reason(finish)
            if self.reason is None:
                raise EngineUnavailable(f"the server ended a branch with {finish!r}")
            if self.reason == "refused":
                self.refusal = Refusal(f"the server ended the branch with {finish!r}", kind="filtered")
            self.stop = choice.get("stop_reason", choice.get("matched_stop"))
            if self.stop is None and self.reason == "stop":
                whole = self.text + text
                self.stop = next((stop for stop in stops if whole.endswith(stop)), None)
                if self.stop is None and choice.get("token_ids"):
                    self.stop = self.ids[-1]  # vLLM does not name the model's own end of a sequence
            if isinstance(self.stop, int):  # where special tokens are shown, so is the one that ends the turn
                text = _END_OF_TURN.sub("", text)
            if self.stop in stops:
                text += _rest_of_last_token(self.text + text, logprobs.get("tokens") or ())
        self.text += text
        return text

    def take_usage(self, usage: Json) -> None:
        """Add what the server reports about the request, whose last branch this is."""
        self.cached = max(self.cached, (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        details = usage.get("completion_tokens_details") or {}
        self.accepted += details.get("accepted_prediction_tokens") or 0
        self.rejected += details.get("rejected_prediction_tokens") or 0

    def _take_logprobs(self, ids: Tokens, logprobs: Json) -> None:
        """Add the likeliest tokens of a server that names tokens by their ids."""
        for token, value, likeliest in zip(
            ids, logprobs.get("token_logprobs") or (), logprobs.get("top_logprobs") or (), strict=False
        ):
            pairs = [(_token_id(name), each) for name, each in (likeliest or {}).items()]
            top = tuple(sorted(((id, each) for id, each in pairs if id is not None), key=lambda pair: -pair[1]))
            self.logprobs.append(TokenLogprob(token, value, top))


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


def _token_id(name: str) -> int | None:
    prefix, _, number = name.partition(":")
    return int(number) if prefix == "token_id" and number.isdigit() else None


def _rest_of_last_token(text: str, tokens: Sequence[str]) -> str:
    """Return what the last token holds after a stop string, where the server cut the text but not its tokens."""
    last = tokens[-1] if tokens else ""
    held = next((length for length in range(len(last), 0, -1) if text.endswith(last[:length])), len(last))
    return last[held:]
