"""The response object: what a job looks like in the words of OpenAI's Responses."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel

from api.openai.narration import End, Narration
from api.openai.responses.body import Form, SummaryText
from api.openai.usage import CachedTokens, ReasoningTokens, Report, reasoning_tokens
from reasoner.jobs.job import Status
from workers.store.serialization import JobDocument


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningItem(BaseModel):
    """What the search did, told in lines."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Literal["in_progress", "completed"]
    summary: list[SummaryText]


MessageStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(BaseModel):
    """The chosen solution; ``incomplete``: the best by then of a search that was cancelled or found no answer."""

    type: Literal["message"] = "message"
    id: str
    status: MessageStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputTokens(CachedTokens):
    cache_write_tokens: int = 0


class ResponseUsage(BaseModel):
    """Of all branches together. ``output_tokens`` is what the job's token budget is held against."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(BaseModel):
    code: Literal["invalid_prompt", "server_error"]
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens", "no_answer"]


class ReasoningAsked(BaseModel):
    effort: str | None
    summary: str


class TextFormat(BaseModel):
    type: Literal["text"] = "text"


class TextAsked(BaseModel):
    format: TextFormat = TextFormat()


class Response(BaseModel):
    """``reasoner`` is what this service adds: the job, its effective budget, its votes."""

    id: str
    object: Literal["response"] = "response"
    created_at: float
    completed_at: float | None
    status: Status
    background: bool
    model: str
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    output: list[ReasoningItem | MessageItem]
    parallel_tool_calls: bool = False
    previous_response_id: str | None
    reasoning: ReasoningAsked
    service_tier: Literal["default"] = "default"
    store: Literal[True] = True
    temperature: float
    text: TextAsked = TextAsked()
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    reasoner: Report

    @classmethod
    def of(cls, job: JobDocument, form: Form, story: Narration) -> Self:
        """Of a job and what its events have told."""
        spec, end = job["spec"], story.end
        return cls(
            id=response_id(job["id"]),
            created_at=job["created_at"],
            completed_at=end.at if end and end.status == "completed" else None,
            status=end.status if end else job["status"],
            background=form.background,
            model=spec["model"],
            error=_error(end),
            incomplete_details=_incomplete(end),
            instructions=form.instructions,
            max_output_tokens=form.max_output_tokens,
            metadata=spec["metadata"],
            output=_output(job["id"], story),
            previous_response_id=form.previous_response_id,
            reasoning=ReasoningAsked(effort=form.effort, summary=form.summary),
            temperature=spec["sampling"]["temperature"],
            top_p=spec["sampling"]["top_p"],
            usage=_usage(end),
            user=spec["metadata"].get("user"),
            reasoner=Report.of(job, end),
        )


def response_id(job_id: str) -> str:
    """What a response is called: the same digits as its job."""
    return f"resp_{job_id.removeprefix('job_')}"


def reasoning_item(job_id: str, text: str | None) -> ReasoningItem:
    """With its text, or when it begins, ``None``."""
    summary = [] if text is None else [SummaryText(type="summary_text", text=text)]
    return ReasoningItem(id=f"rs_{job_id.removeprefix('job_')}", status=_state(text), summary=summary)


def message_item(job_id: str, status: MessageStatus, text: str) -> MessageItem:
    """With its text, but when it begins."""
    content = [] if status == "in_progress" else [OutputText(text=text)]
    return MessageItem(id=f"msg_{job_id.removeprefix('job_')}", status=status, content=content)


def message_status(end: End) -> MessageStatus | None:
    """Return how the message stands with which a response ended; ``None`` where there is nothing to say."""
    if end.status == "completed":
        return "completed"
    return "incomplete" if end.content else None


def _state(text: str | None) -> Literal["in_progress", "completed"]:
    return "in_progress" if text is None else "completed"


def _output(job_id: str, story: Narration) -> list[ReasoningItem | MessageItem]:
    if story.end is None:
        return []
    items: list[ReasoningItem | MessageItem] = [reasoning_item(job_id, story.text)]
    status = message_status(story.end)
    return items if status is None else [*items, message_item(job_id, status, story.end.content)]


def _error(end: End | None) -> ResponseError | None:
    if end is None or end.error is None:
        return None
    code: Literal["invalid_prompt", "server_error"] = (
        "invalid_prompt" if end.error.code == "invalid_request" else "server_error"
    )
    return ResponseError(code=code, message=end.error.message)


def _incomplete(end: End | None) -> IncompleteDetails | None:
    if end is None or end.result is None or end.status != "incomplete":
        return None
    return IncompleteDetails(reason="max_output_tokens" if end.result.finish_reason == "budget" else "no_answer")


def _usage(end: End | None) -> ResponseUsage | None:
    if end is None:
        return None
    return ResponseUsage(
        input_tokens=end.usage.prompt,
        input_tokens_details=InputTokens(cached_tokens=end.usage.cached),
        output_tokens=end.usage.total,
        output_tokens_details=ReasoningTokens(reasoning_tokens=reasoning_tokens(end)),
        total_tokens=end.usage.prompt + end.usage.total,
    )
