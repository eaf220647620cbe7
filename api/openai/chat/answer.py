"""Chat completions as one object, and as a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel

from api.conversation.calls import split_arguments
from api.conversation.failures import INTERRUPTIONS, failure_problem, interruption_problem
from api.conversation.narration import JobEnd, Narration, ReasoningContent
from api.conversation.report import Report, count_reasoning_tokens, show_model
from api.openai.errors import stream_error
from api.openai.functions import AnswerCall, build_calls
from api.openai.usage import CachedTokens, ReasoningTokens
from reasoner.jobs.events import Event
from reasoner.jobs.job import TopToken
from workers.store.serialization import JobDocument

Json = dict[str, Any]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ChatUsage(BaseModel):
    """Usage of all branches together. ``completion_tokens`` counts against the token budget of the job."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class AssistantMessage(BaseModel):
    """``reasoning_content`` is the thought of the chosen solution, or the narration of the search."""

    role: Literal["assistant"]
    content: str | None
    """``None`` for an answer of calls alone."""
    reasoning_content: str
    refusal: None = None
    tool_calls: list[AnswerCall] | None = None


class TopLogprob(BaseModel):
    """``bytes`` are those of the text in UTF-8; none for a token that is no whole character, whose name has its id."""

    token: str
    logprob: float
    bytes: list[int] | None

    @classmethod
    def from_token(cls, token: TopToken) -> Self:
        encoded = None if token.token.startswith("token_id:") else list(token.token.encode())
        return cls(token=token.token, logprob=token.logprob, bytes=encoded)


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of the content's tokens, with the line breaks around it."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    """The chosen solution, or the best one of the next answers in their order.

    ``finish_reason`` is ``length`` if the solution was cut off: by the model's context, its own length or the budget;
    ``content_filter`` if its server withheld the rest of it.
    """

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    metadata: dict[str, str]
    reasoner: Report


def build_completion(
    job: JobDocument, narration: Narration, end: JobEnd, wanted: ReasoningContent | None
) -> ChatCompletion:
    """Return the completion of a job that has ended with a result."""
    choices = [
        ChatChoice(
            index=index,
            message=AssistantMessage(
                role="assistant",
                content=None if shown.calls and not shown.content else shown.content,
                reasoning_content=shown.reasoning,
                tool_calls=shown.calls or None,
            ),
            finish_reason=_finish_reason(end, index, shown),
            logprobs=_build_logprobs(end, index),
        )
        for index, shown in enumerate(_list_choices(job["id"], narration, end, wanted))
    ]
    return ChatCompletion(
        id=completion_id(job["id"]),
        object="chat.completion",
        created=int(job["created_at"]),
        model=show_model(job["spec"]),
        choices=choices,
        usage=_build_usage(end),
        metadata=job["spec"]["metadata"],
        reasoner=Report.from_job(job, end),
    )


async def stream_chunks(
    job: JobDocument,
    narration: Narration,
    events: AsyncIterator[Event],
    *,
    usage: bool,
    wanted: ReasoningContent | None,
) -> AsyncIterator[str]:
    """Yield the data of the server-sent events: the narration while the search runs, or the chosen thought at its end,
    then the answer, and the further choices one after the other.

    With ``usage`` a chunk of its own has the usage. A failed search, and a service that shuts down, end the stream with
    an error.
    """
    yield _build_chunk(job, {"role": "assistant", "content": ""}, usage=usage)
    try:
        async for event in events:
            text = narration.add(event)
            if text and shows_narration(narration, wanted):  # by default until a branch shows that the model thinks
                yield _build_chunk(job, {"reasoning_content": text}, usage=usage)
    except INTERRUPTIONS as error:
        yield json.dumps({"error": stream_error(interruption_problem(error)).model_dump()})
        return
    end = narration.end
    if end is None or end.result is None or end.status == "cancelled":
        yield json.dumps({"error": stream_error(failure_problem(end)).model_dump()})
        return
    for index, shown in enumerate(_list_choices(job["id"], narration, end, wanted)):
        if index:
            yield _build_chunk(job, {"role": "assistant", "content": ""}, usage=usage, index=index)
        if index or not shows_narration(narration, wanted):  # else it has been sent
            for line in shown.reasoning.splitlines(keepends=True):
                yield _build_chunk(job, {"reasoning_content": line}, usage=usage, index=index)
        for line in shown.content.splitlines(keepends=True):
            yield _build_chunk(job, {"content": line}, usage=usage, index=index)
        for delta in _call_deltas(shown.calls):
            yield _build_chunk(job, {"tool_calls": [delta]}, usage=usage, index=index)
        report = {} if index else {"reasoner": Report.from_job(job, end).model_dump()}
        logprobs, reason = _build_logprobs(end, index), _finish_reason(end, index, shown)
        yield _build_chunk(job, {}, usage=usage, index=index, finish_reason=reason, logprobs=logprobs, **report)
    if usage:
        yield json.dumps(_build_envelope(job) | {"choices": [], "usage": _build_usage(end).model_dump()})
    yield "[DONE]"


def shows_narration(narration: Narration, wanted: ReasoningContent | None) -> bool:
    """Return True if ``reasoning_content`` describes the search: by choice, or since the model does not think."""
    return wanted == "narration" if wanted is not None else not narration.has_thoughts


@dataclass(frozen=True, slots=True)
class _Choice:
    reasoning: str
    content: str
    calls: list[AnswerCall]


def _list_choices(job_id: str, narration: Narration, end: JobEnd, wanted: ReasoningContent | None) -> list[_Choice]:
    """Return the choices of an answer. The search is described once, by the first."""
    shown = [] if end.result is None else end.result.solutions
    reasoning = [solution.thought or "" for solution in shown]
    if shows_narration(narration, wanted):
        reasoning = [narration.text, *[""] * (len(shown) - 1)]
    calls = [build_calls(job_id, solution.tool_calls, choice) for choice, solution in enumerate(shown)]
    contents = end.content, *end.other_contents
    return [_Choice(thought, text, made) for thought, text, made in zip(reasoning, contents, calls, strict=True)]


def _build_logprobs(end: JobEnd, index: int) -> ChoiceLogprobs | None:
    """Return the log-probabilities of a choice, if there are any."""
    tokens = None if end.result is None else end.result.solutions[index].logprobs
    if tokens is None:
        return None
    content = [TokenLogprob.from_token(token) for token in tokens]
    for shown, token in zip(content, tokens, strict=True):
        shown.top_logprobs = [TopLogprob.from_token(other) for other in token.top]
    return ChoiceLogprobs(content=content)


def _call_deltas(calls: list[AnswerCall]) -> Iterator[Json]:
    """Yield the parts of a choice's calls: of each first its name, then its arguments in pieces."""
    for index, call in enumerate(calls):
        function = {"name": call.function.name, "arguments": ""}
        yield {"index": index, "id": call.id, "type": "function", "function": function}
        for piece in split_arguments(call.function.arguments):
            yield {"index": index, "function": {"arguments": piece}}


def completion_id(job_id: str) -> str:
    """Return the id of a job's completion, which has the same digits."""
    return f"chatcmpl-{job_id.removeprefix('job_')}"


def _build_chunk(
    job: JobDocument,
    delta: Json,
    *,
    usage: bool,
    index: int = 0,
    finish_reason: str | None = None,
    logprobs: ChoiceLogprobs | None = None,
    **more: Json,
) -> str:
    shown = logprobs and logprobs.model_dump()
    choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": shown}
    chunk = _build_envelope(job) | {"choices": [choice]} | more
    # ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
    return json.dumps(chunk | {"usage": None} if usage else chunk)


def _build_envelope(job: JobDocument) -> Json:
    return {
        "id": completion_id(job["id"]),
        "object": "chat.completion.chunk",
        "created": int(job["created_at"]),
        "model": show_model(job["spec"]),
    }


def _finish_reason(end: JobEnd, index: int, shown: _Choice) -> FinishReason:
    """Return ``length`` only if the choice itself was cut off, not if the search ended after it was found."""
    if shown.calls:
        return "tool_calls"
    cut = end.cuts[index]
    return "length" if cut == "context" else cut or "stop"


def _build_usage(end: JobEnd) -> ChatUsage:
    return ChatUsage(
        prompt_tokens=end.usage.prompt,
        completion_tokens=end.usage.total,
        total_tokens=end.usage.prompt + end.usage.total,
        prompt_tokens_details=CachedTokens(cached_tokens=end.usage.cached),
        completion_tokens_details=ReasoningTokens(reasoning_tokens=count_reasoning_tokens(end)),
    )
