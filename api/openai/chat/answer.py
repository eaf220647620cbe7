"""Chat completions: whole, and as a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import BaseModel

from api.http.problems import SHUTTING_DOWN
from api.openai.errors import stream_error
from api.openai.narration import End, Narration
from api.openai.usage import CachedTokens, ReasoningTokens, Report, reasoning_tokens
from reasoner.jobs.event import Event
from workers.store.jobs import ShuttingDown
from workers.store.serialization import JobDocument

Json = dict[str, Any]


class ChatUsage(BaseModel):
    """Of all branches together. ``completion_tokens`` is what the job's token budget is held against."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class AssistantMessage(BaseModel):
    """``reasoning_content`` tells what the search did."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """``length``: the budget ended before any branch stated an answer."""

    index: int
    message: AssistantMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    metadata: dict[str, str]
    reasoner: Report


def completion(job: JobDocument, story: Narration, end: End) -> ChatCompletion:
    """The answer of a job that has ended with one, or without."""
    message = AssistantMessage(role="assistant", content=end.content, reasoning_content=story.text)
    return ChatCompletion(
        id=completion_id(job["id"]),
        object="chat.completion",
        created=int(job["created_at"]),
        model=job["spec"]["model"],
        choices=[ChatChoice(index=0, message=message, finish_reason=_finish_reason(end))],
        usage=_usage(end),
        metadata=job["spec"]["metadata"],
        reasoner=Report.of(job, end),
    )


async def chunks(
    job: JobDocument, story: Narration, events: AsyncIterator[Event], *, usage: bool
) -> AsyncIterator[str]:
    """The same as the data of server-sent events: first what the search does, while it does it, then the answer.

    ``usage``: in a chunk of its own. A search that fails ends the stream with an error, and so does a service that is
    about to end.
    """
    yield _chunk(job, {"role": "assistant", "content": ""}, usage=usage)
    try:
        async for event in events:
            told = story.take(event)
            if told:
                yield _chunk(job, {"reasoning_content": told}, usage=usage)
    except ShuttingDown:
        yield json.dumps({"error": stream_error(SHUTTING_DOWN).model_dump()})
        return
    end = story.end
    if end is None or end.result is None or end.status == "cancelled":
        yield json.dumps({"error": _error(end)})
        return
    for line in end.content.splitlines(keepends=True):
        yield _chunk(job, {"content": line}, usage=usage)
    report = Report.of(job, end).model_dump()
    yield _chunk(job, {}, usage=usage, finish_reason=_finish_reason(end), reasoner=report)
    if usage:
        yield json.dumps(_envelope(job) | {"choices": [], "usage": _usage(end).model_dump()})
    yield "[DONE]"


def completion_id(job_id: str) -> str:
    """What a completion is called: the same digits as its job."""
    return f"chatcmpl-{job_id.removeprefix('job_')}"


def _chunk(job: JobDocument, delta: Json, *, usage: bool, finish_reason: str | None = None, **more: Json) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    chunk = _envelope(job) | {"choices": [choice]} | more
    # In ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
    return json.dumps(chunk | {"usage": None} if usage else chunk)


def _envelope(job: JobDocument) -> Json:
    return {
        "id": completion_id(job["id"]),
        "object": "chat.completion.chunk",
        "created": int(job["created_at"]),
        "model": job["spec"]["model"],
    }


def _finish_reason(end: End) -> Literal["stop", "length"]:
    """A budget that ended after an answer was found has cut nothing off that answer."""
    cut = end.result is not None and end.result.answer is None and end.result.finish_reason == "budget"
    return "length" if cut else "stop"


def _error(end: End | None) -> Json:
    if end is None:
        return {"message": "the job was deleted", "type": "server_error", "param": None, "code": "deleted"}
    if end.error is None:
        return {"message": "the job was cancelled", "type": "server_error", "param": None, "code": "cancelled"}
    return {"message": end.error.message, "type": "server_error", "param": None, "code": end.error.code}


def _usage(end: End) -> ChatUsage:
    return ChatUsage(
        prompt_tokens=end.usage.prompt,
        completion_tokens=end.usage.total,
        total_tokens=end.usage.prompt + end.usage.total,
        prompt_tokens_details=CachedTokens(cached_tokens=end.usage.cached),
        completion_tokens_details=ReasoningTokens(reasoning_tokens=reasoning_tokens(end)),
    )
