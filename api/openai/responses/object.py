"""The response object of OpenAI's Responses, built from a job."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel

from api.conversation.failures import name_too_long
from api.conversation.narration import JobEnd, Narration
from api.conversation.report import Report, count_reasoning_tokens, show_model
from api.openai.functions import FunctionCallItem, build_call_item
from api.openai.responses.body import EchoedFields, SummaryText
from api.openai.usage import CachedTokens, ReasoningTokens
from reasoner.jobs.job import Status
from workers.store.serialization import JobDocument


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningItem(BaseModel):
    """The narration of the search, in lines."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: Literal["in_progress", "completed"]
    summary: list[SummaryText]


MessageStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(BaseModel):
    """The chosen solution, or, ``incomplete``, the best one of a search that was cancelled or found no answer."""

    type: Literal["message"] = "message"
    id: str
    status: MessageStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


class InputTokens(CachedTokens):
    cache_write_tokens: int = 0


class ResponseUsage(BaseModel):
    """Usage of all branches together. ``output_tokens`` counts against the token budget of the job."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(BaseModel):
    """The error of a failed job, in the form of all errors: some clients ask for ``type`` and ``param``, too."""

    code: Literal["invalid_prompt", "context_length_exceeded", "server_error"]
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = None


class IncompleteDetails(BaseModel):
    """``max_output_tokens``, OpenAI's word, stands for every limit: of tokens, of time and of the model's context."""

    reason: Literal["max_output_tokens", "content_filter"] = "max_output_tokens"


class ReasoningSettings(BaseModel):
    effort: str | None
    summary: str


class Response(BaseModel):
    """OpenAI's response object. ``reasoner`` is added by this service: the job, its resolved budget and its votes."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    model: str
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningSettings
    service_tier: Literal["default"] = "default"
    store: Literal[True] = True
    temperature: float | None
    text: dict[str, dict[str, Any]]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    reasoner: Report

    @classmethod
    def from_job(cls, job: JobDocument, echoed: EchoedFields, narration: Narration) -> Self:
        """Return the response of a job with the narration of its events so far."""
        spec, end = job["spec"], narration.end
        return cls(
            id=response_id(job["id"]),
            created_at=int(job["created_at"]),
            completed_at=int(end.at) if end and response_status(end) == "completed" else None,
            status=response_status(end) if end else job["status"],
            background=echoed.background,
            model=show_model(spec),
            error=_build_error(end),
            incomplete_details=_build_incomplete_details(end),
            instructions=echoed.instructions,
            max_output_tokens=echoed.max_output_tokens,
            metadata=spec["metadata"],
            output=_build_output(job["id"], narration),
            parallel_tool_calls=spec.get("parallel_tool_calls", True),
            previous_response_id=echoed.previous_response_id,
            reasoning=ReasoningSettings(effort=echoed.effort, summary=echoed.summary),
            temperature=spec["sampling"]["temperature"],
            text={"format": echoed.format or {"type": "text"}},
            tool_choice=_tool_choice(spec.get("tool_choice", "auto")),
            tools=spec.get("tools", []),
            top_p=spec["sampling"]["top_p"],
            usage=_build_usage(end),
            user=spec["metadata"].get("user"),
            reasoner=Report.from_job(job, end),
        )


def response_id(job_id: str) -> str:
    """Return the id of a job's response, which has the same digits."""
    return f"resp_{job_id.removeprefix('job_')}"


def reasoning_item(job_id: str, text: str | None) -> ReasoningItem:
    """Return the reasoning item; ``text`` is None while it is in progress."""
    summary = [] if text is None else [SummaryText(type="summary_text", text=text)]
    return ReasoningItem(id=f"rs_{job_id.removeprefix('job_')}", status=_get_status(text), summary=summary)


def message_item(job_id: str, status: MessageStatus, text: str) -> MessageItem:
    """Return the message item, without content while it is in progress."""
    content = [] if status == "in_progress" else [OutputText(text=text)]
    return MessageItem(id=f"msg_{job_id.removeprefix('job_')}", status=status, content=content)


def response_status(end: JobEnd) -> Status:
    """Return the status of a response that has ended: it is ``incomplete`` exactly where its solution was cut off.

    The job behind it may be completed, with an answer that such a solution states, or be incomplete because a whole
    solution states none.
    """
    if end.status not in ("completed", "incomplete") or end.result is None:
        return end.status
    return "incomplete" if not end.result.tool_calls and (not end.cuts or end.cuts[0] is not None) else "completed"


def message_status(end: JobEnd) -> MessageStatus | None:
    """Return the status of the message of a response that has ended; None if it has no message."""
    if response_status(end) == "completed":
        is_call_alone = end.result is not None and end.result.tool_calls and not end.content
        return None if is_call_alone else "completed"
    return "incomplete" if end.content else None


def _get_status(text: str | None) -> Literal["in_progress", "completed"]:
    return "in_progress" if text is None else "completed"


def _build_output(job_id: str, narration: Narration) -> list[OutputItem]:
    end = narration.end
    if end is None:
        return []
    items: list[OutputItem] = [reasoning_item(job_id, narration.text)]
    if (status := message_status(end)) is not None:
        items.append(message_item(job_id, status, end.content))
    calls = end.result.tool_calls if end.result is not None else []
    return [*items, *(build_call_item(job_id, index, call) for index, call in enumerate(calls))]


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    return choice if isinstance(choice, str) else {"type": "function", **choice}


def _build_error(end: JobEnd | None) -> ResponseError | None:
    if end is None or end.error is None:
        return None
    code = end.error.code
    if code == "context_length_exceeded":
        message = name_too_long(end.error.message)
        return ResponseError(code=code, message=message, type="invalid_request_error", param="input")
    if code in ("invalid_request", "content_filter"):
        return ResponseError(code="invalid_prompt", message=end.error.message, type="invalid_request_error")
    return ResponseError(code="server_error", message=end.error.message, type="server_error")


def _build_incomplete_details(end: JobEnd | None) -> IncompleteDetails | None:
    if end is None or response_status(end) != "incomplete":
        return None
    return IncompleteDetails(reason="content_filter" if end.cuts[:1] == ("content_filter",) else "max_output_tokens")


def _build_usage(end: JobEnd | None) -> ResponseUsage | None:
    if end is None:
        return None
    return ResponseUsage(
        input_tokens=end.usage.prompt,
        input_tokens_details=InputTokens(cached_tokens=end.usage.cached),
        output_tokens=end.usage.total,
        output_tokens_details=ReasoningTokens(reasoning_tokens=count_reasoning_tokens(end)),
        total_tokens=end.usage.prompt + end.usage.total,
    )
