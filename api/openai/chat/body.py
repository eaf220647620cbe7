"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from api.openai.chat.answer import ReasoningContent
from api.openai.content import EmptyList, Text
from api.openai.formats import ChatFormat, to_constraint
from api.openai.request import OpenAIRequest, Tokens
from api.openai.unsupported import CHAT, remove_neutral_fields
from engine.protocol.request_checks import MAX_LOGPROBS
from reasoner.base_model import StrictModel
from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.sampling_spec import Penalty
from reasoner.jobs.spec import MAX_ALTERNATIVES, Message


class ChatMessage(StrictModel):
    """A turn. Messages of this service may be sent back unchanged; the model does not see ``reasoning_content``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    reasoning_content: str | None = None
    refusal: None = None
    annotations: EmptyList = None
    audio: None = None
    function_call: None = None
    tool_calls: EmptyList = None


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(None, description="Send the usage in a chunk of its own, at the end.")
    include_obfuscation: Literal[False] | None = None


class ChatBody(OpenAIRequest):
    """The fields of OpenAI's Chat Completions, and those of ``OpenAIRequest``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=64)]
    max_completion_tokens: Tokens | None = Field(None, description="Bounds the job's tokens.")
    max_tokens: Tokens | None = Field(None, description="The same as max_completion_tokens.")
    n: Annotated[int, Field(ge=1, le=MAX_ALTERNATIVES + 1)] | None = Field(
        None,
        description="Choices at most, each with another answer of one search, the best first. 'n' of 'strategy' is the "
        "number of sampled solutions.",
    )
    logprobs: bool | None = Field(
        None,
        description="Log-probabilities of the tokens of each choice, computed at the end of the search, if its budget "
        "is not used up by then.",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Likeliest tokens at each position; needs 'logprobs'."
    )
    frequency_penalty: Penalty | None = Field(None, description="As in the job's sampling.")
    presence_penalty: Penalty | None = Field(None, description="As in the job's sampling.")
    reasoning_effort: str | None = Field(None, description="The same as reasoning.effort.")
    reasoning_content: ReasoningContent | None = Field(
        None,
        description="Text of the message's reasoning_content: the thought of the chosen solution, or the narration of "
        "the search. By default the thought if the model thinks.",
    )
    stream_options: StreamOptions | None = None
    response_format: ChatFormat | None = Field(
        None, description="Holds the answer, after its thought, to JSON or to a JSON Schema, token by token."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return remove_neutral_fields(body, CHAT)

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs 'logprobs': give that as true")
        return value

    def to_messages(self) -> list[Message]:
        """Return the conversation for the model."""
        return [to_message(message.role, message.content) for message in self.messages]

    def efforts(self) -> dict[str, str]:
        own = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return own | super().efforts()

    def sampling(self) -> dict[str, float | None]:
        penalties = {"frequency_penalty": self.frequency_penalty, "presence_penalty": self.presence_penalty}
        return super().sampling() | penalties

    def more_job_fields(self) -> dict[str, Any]:
        fields = {} if self.n is None else {"alternatives": self.n - 1}
        return fields | {"logprobs": self.top_logprobs or 0} if self.logprobs else fields

    def format_constraint(self) -> ConstraintSpec | None:
        return to_constraint(self.response_format)

    def token_bounds(self) -> list[int]:
        own = (self.max_completion_tokens, self.max_tokens)
        return [tokens for tokens in own if tokens is not None] + super().token_bounds()


def to_message(role: Literal["system", "developer", "user", "assistant"], content: str) -> Message:
    """Return a message of the job; OpenAI's role ``developer`` is the ``system`` of other models."""
    return Message(role="system" if role == "developer" else role, content=content)
