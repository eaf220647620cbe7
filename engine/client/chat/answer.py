"""The part of an answer that a chat server has sent so far."""

from __future__ import annotations

from dataclasses import dataclass

from engine.client.chat.encoding import count_tokens, encode_text
from engine.protocol.types import Branch, EngineUnavailable, FinishReason, Tokens
from engine.protocol.wire import Json

_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
}


@dataclass
class ChatAnswer:
    """The text of one branch, from one request or, after interruptions, from several."""

    index: int
    """The place of the branch in the caller's request."""
    branch: Branch
    text: str = ""
    reason: FinishReason | None = None
    stop: str | None = None
    """The stop string that ended the branch, if the server tells."""
    earlier: Tokens = ()
    """The tokens of requests before this one, which were cut."""
    num_events: int = 0
    """The number of parts that this request has sent, of text or of hidden reasoning."""
    reported: int | None = None
    prompt: int = 0
    cached: int = 0

    def take(self, chunk: Json) -> str:
        """Add an event of the stream and return its text."""
        usage = chunk.get("usage") or {}
        if isinstance(usage.get("completion_tokens"), int):
            self.reported = usage["completion_tokens"]
            self.prompt = usage.get("prompt_tokens") or self.prompt
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self.cached
        if not chunk.get("choices"):
            return ""
        choice = chunk["choices"][0]
        delta = choice.get("delta") or {}
        text: str = delta.get("content") or ""
        self.num_events += any(delta.get(name) for name in ("content", "reasoning_content", "reasoning"))
        self.text += text
        finish = choice.get("finish_reason")
        if finish is not None:
            if finish not in _REASONS:
                raise EngineUnavailable(f"the server ended an answer with {finish!r}")
            self.reason = _REASONS[finish]
            stop = choice.get("stop_reason", choice.get("matched_stop"))
            if isinstance(stop, str):  # the server has cut it off
                self.stop = stop
                self.text += stop
                text += stop
        return text

    @property
    def token_ids(self) -> Tokens:
        """The tokens of the branch: those that the server bills, also for hidden reasoning.

        Without a report, since the stream was cut, each event counts as a token.
        """
        count = self.num_events if self.reported is None else self.reported
        return self.earlier + encode_text(self.text, count_tokens(self.text, count or None))

    def keep(self) -> None:
        """Keep what has arrived as the beginning of the answer, which another request continues."""
        self.earlier, self.text, self.num_events, self.reported = self.token_ids, "", 0, None

    def drop(self) -> None:
        """Forget the text that has arrived, since no request can continue it; its tokens stay on the bill."""
        self.earlier, self.text, self.num_events, self.reported = encode_text("", len(self.token_ids)), "", 0, None
