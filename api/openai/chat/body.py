"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from api.conversation.narration import ReasoningContent
from api.conversation.request import Tokens
from api.conversation.sent_fields import Turn, naming_field
from api.conversation.thoughts import strip_thoughts
from api.conversation.unsupported import Neutral, remove_neutral_fields
from api.openai.content import Text
from api.openai.formats import ChatFormat, to_constraint
from api.openai.functions import ChatNamedChoice, ChatTool, Plain, to_tool_choice, to_tools
from api.openai.request import OpenAIRequest
from api.openai.unsupported import CHAT, IGNORED
from engine.protocol.request_checks import MAX_LOGPROBS
from reasoner.base_model import StrictModel
from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.messages import MAX_CALLS, MAX_MESSAGES, CalledFunction, CallId, Message, MessageCall
from reasoner.jobs.sampling_spec import Penalty
from reasoner.jobs.spec import MAX_ALTERNATIVES
from reasoner.jobs.tool_specs import MAX_TOOLS, FunctionTool, PythonTool, ToolChoice


class ChatCalledFunction(CalledFunction):
    parsed_arguments: Neutral = None


class ChatCall(StrictModel):
    """A call that the assistant made."""

    id: CallId
    type: Literal["function"] = "function"
    function: ChatCalledFunction
    index: Neutral = None
    cache_control: Neutral = None
    extra_content: Neutral = None
    provider_specific_fields: Neutral = None

    def to_call(self) -> MessageCall:
        function = CalledFunction(name=self.function.name, arguments=self.function.arguments)
        return MessageCall(id=self.id, function=function)


class ChatMessage(StrictModel):
    """A turn. Messages of any service may be sent back unchanged; the model does not see their thoughts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    tool_call_id: CallId | None = None
    tool_calls: Annotated[list[ChatCall], Field(max_length=MAX_CALLS)] | None = None
    refusal: str | None = Field(None, description="The text of an assistant without content.")
    audio: None = None
    function_call: None = None
    name: Neutral = None
    type: Neutral = None
    cache_control: Neutral = None
    reasoning: Neutral = None
    reasoning_content: Neutral = None
    reasoning_details: Neutral = None
    thinking_blocks: Neutral = None
    annotations: Neutral = None
    parsed: Neutral = None
    provider_specific_fields: Neutral = None

    def to_message(self) -> Message:
        """Return the message of the job; OpenAI's role ``developer`` is the ``system`` of other models."""
        role: Any = "system" if self.role == "developer" else self.role
        content = self.content
        if role == "assistant":
            content = content or self.refusal or content
            content = None if content is None else strip_thoughts(content)
        calls = [call.to_call() for call in self.tool_calls or ()]
        return Message(role=role, content=content, tool_calls=calls, tool_call_id=self.tool_call_id)


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(None, description="Send the usage in a chunk of its own, at the end.")
    include_obfuscation: Literal[False] | None = None


class ChatBody(OpenAIRequest):
    """The fields of OpenAI's Chat Completions, and those of ``OpenAIRequest``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
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
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="Functions that an answer may call, and 'python', which solutions may run while they reason.",
    )
    tool_choice: Plain | ChatNamedChoice | None = None
    response_format: ChatFormat | None = Field(
        None, description="Holds the answer, after its thought, to JSON or to a JSON Schema, token by token."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return remove_neutral_fields(body, CHAT, IGNORED)

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs 'logprobs': give that as true")
        return value

    def to_turns(self) -> list[Turn]:
        """Return the conversation for the model."""
        turns = []
        for index, message in enumerate(self.messages):
            with naming_field(f"messages.{index}"):
                turns.append(Turn(f"messages.{index}", message.to_message()))
        return turns

    def sent_fields(self, turns: Sequence[Turn]) -> dict[str, str]:
        names = {"problem": "messages", "alternatives": "n"}
        names |= {"logprobs": "logprobs" if self.top_logprobs is None else "top_logprobs"}
        if self.format_constraint() is not None:
            names |= {"constraint": "response_format", "constraint.json_schema": "response_format.json_schema.schema"}
        return super().sent_fields(turns) | names

    def job_tools(self) -> tuple[list[PythonTool | FunctionTool], ToolChoice | None]:
        return to_tools(self.tools), to_tool_choice(self.tool_choice)

    def efforts(self) -> dict[str, str]:
        own = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return own | super().efforts()

    def sampling(self) -> dict[str, float | None]:
        penalties = {"frequency_penalty": self.frequency_penalty, "presence_penalty": self.presence_penalty}
        return super().sampling() | penalties

    def more_job_fields(self) -> dict[str, Any]:
        fields = super().more_job_fields() | ({} if self.n is None else {"alternatives": self.n - 1})
        return fields | {"logprobs": self.top_logprobs or 0} if self.logprobs else fields

    def format_constraint(self) -> ConstraintSpec | None:
        return to_constraint(self.response_format)

    def token_bounds(self) -> dict[str, int]:
        own = {"max_completion_tokens": self.max_completion_tokens, "max_tokens": self.max_tokens}
        return {field: tokens for field, tokens in own.items() if tokens is not None} | super().token_bounds()
