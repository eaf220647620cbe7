"""A message as one object: the chosen solution of a search."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, Literal

from pydantic import BaseModel

from api.conversation.calls import make_call_id
from api.conversation.narration import JobEnd
from api.conversation.report import Report, count_reasoning_tokens, show_model
from workers.store.serialization import JobDocument

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]


class Text(BaseModel):
    """The solution after its thought."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class Thinking(BaseModel):
    """The thought of the chosen solution, or the narration of the search; empty if it is not to be shown."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUse(BaseModel):
    """A call of a function of the client."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Content = Text | Thinking | ToolUse


class OutputTokens(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """Usage of all branches together. ``output_tokens`` counts against the token budget of the job; all of them but
    those of the shown solution are thinking tokens. Prompts that were cached are in ``cache_read_input_tokens`` alone.
    """

    input_tokens: int = 0
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: OutputTokens = OutputTokens(thinking_tokens=0)


class RefusalDetails(BaseModel):
    type: Literal["refusal"] = "refusal"
    category: None = None
    explanation: None = None


class MessageStop(BaseModel):
    """The end of a message: ``refusal`` means that the model's server withheld the rest of it."""

    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: RefusalDetails | None = None


class Message(MessageStop):
    """Anthropic's message. ``reasoner`` is added by this service: the job, its resolved budget and its votes."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    usage: MessageUsage
    reasoner: Report | None = None


def build_message(
    job: JobDocument,
    content: list[Content] | None = None,
    stop: MessageStop | None = None,
    *,
    end: JobEnd | None = None,
) -> Message:
    """Return the message of a job that has ended with a result, or the beginning of one that runs."""
    return Message(
        id=f"msg_{job['id'].removeprefix('job_')}",
        model=show_model(job["spec"]),
        content=content or [],
        usage=MessageUsage() if end is None else count_usage(end),
        reasoner=None if end is None else Report.from_job(job, end),
        **(stop or MessageStop()).model_dump(),
    )


def count_usage(end: JobEnd) -> MessageUsage:
    """Return the usage of a job that has ended."""
    return MessageUsage(
        input_tokens=end.usage.prompt - end.usage.cached,
        cache_read_input_tokens=end.usage.cached,
        output_tokens=end.usage.total,
        output_tokens_details=OutputTokens(thinking_tokens=count_reasoning_tokens(end)),
    )


def find_stop(end: JobEnd) -> MessageStop:
    """Return the reason for which the chosen solution ended, not the search."""
    cut, stop = (end.cuts or ("length",))[0], (end.stops or (None,))[0]
    if end.result is not None and end.result.tool_calls:
        return MessageStop(stop_reason="tool_use")
    match cut:
        case "content_filter":
            return MessageStop(stop_reason="refusal", stop_details=RefusalDetails())
        case "context":
            return MessageStop(stop_reason="model_context_window_exceeded")
        case "length":
            return MessageStop(stop_reason="max_tokens")
    return MessageStop(stop_reason="end_turn" if stop is None else "stop_sequence", stop_sequence=stop)


def build_content(job_id: str, end: JobEnd, thinking: str | None) -> list[Content]:
    """Return the blocks of an answer. ``thinking`` is the text of the thinking block; ``None``: there is none."""
    content: list[Content] = []
    if thinking is not None:
        content.append(Thinking(thinking=thinking, signature=_sign(job_id, thinking)))
    if end.content:
        content.append(Text(text=end.content))
    for index, call in enumerate(end.result.tool_calls if end.result is not None else ()):
        arguments = json.loads(call.arguments or "{}")
        content.append(ToolUse(id=make_call_id(job_id, index), name=call.name, input=arguments))
    return content


def _sign(job_id: str, thinking: str) -> str:
    """Return a text that is the same for the same thinking: clients send it back, and nothing depends on it."""
    return blake2b(f"{job_id}/{thinking}".encode(), digest_size=24).hexdigest()
