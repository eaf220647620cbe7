"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from api.openai.content import Nothing, Text
from api.openai.request import Asked, Tokens
from api.openai.unsupported import CHAT, remove_neutral_fields
from reasoner.base_model import StrictModel
from reasoner.jobs.spec import Message


class ChatMessage(StrictModel):
    """A turn. What this service said comes back as it was said; ``reasoning_content`` is not shown to the model."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    reasoning_content: str | None = None
    refusal: None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing = None


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(None, description="Send the usage in a chunk of its own, at the end.")
    include_obfuscation: Literal[False] | None = None


class ChatBody(Asked):
    """A question, in OpenAI's words."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=64)]
    max_completion_tokens: Tokens | None = Field(None, description="Bounds the job's tokens.")
    max_tokens: Tokens | None = Field(None, description="The same.")
    reasoning_effort: str | None = Field(None, description="The same as reasoning.effort.")
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, body: Any) -> Any:
        return remove_neutral_fields(body, CHAT)

    def to_messages(self) -> list[Message]:
        """What the model gets to read."""
        return [as_message(message.role, message.content) for message in self.messages]

    def efforts(self) -> dict[str, str]:
        """See ``Asked``."""
        own = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return own | super().efforts()

    def bounds(self) -> list[int]:
        """See ``Asked``."""
        own = (self.max_completion_tokens, self.max_tokens)
        return [tokens for tokens in own if tokens is not None] + super().bounds()


def as_message(role: Literal["system", "developer", "user", "assistant"], content: str) -> Message:
    """A developer is what OpenAI calls the system since it has a system of its own above it."""
    return Message(role="system" if role == "developer" else role, content=content)
