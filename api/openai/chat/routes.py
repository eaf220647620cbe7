"""``/v1/chat/completions``: a job, and its client on the line until it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import JSONResponse

from api.http.principal import Writer
from api.http.problems import Problem
from api.http.request_parsing import IdempotencyKey, JsonRoute, read_idempotency
from api.http.state import State
from api.http.submission import submit_job
from api.openai.chat.answer import ChatCompletion, chunks, completion
from api.openai.chat.body import ChatBody
from api.openai.errors import ErrorDocument
from api.openai.narration import End, Narration
from api.openai.streaming import ClientDisconnected, EventStream, cancel_abandoned_job, ended

router = APIRouter(
    prefix="/v1", route_class=JsonRoute, tags=["openai"], responses={"default": {"model": ErrorDocument}}
)

PROBLEM = "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 24."
EXAMPLES: dict[str, Any] = {
    "plain": {
        "summary": "A question, with an effort",
        "value": {
            "model": "policy",
            "messages": [{"role": "user", "content": PROBLEM}],
            "reasoning_effort": "medium",
            "max_completion_tokens": 4000,
        },
    },
    "search": {
        "summary": "A search of one's own, as a stream",
        "value": {
            "model": "policy",
            "messages": [{"role": "user", "content": PROBLEM}],
            "strategy": {"name": "beam", "n": 16},
            "budget": {"tokens": 4000, "seconds": 20},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
}
_STATUS = {"invalid_request": 422, "engine_error": 502, "max_attempts": 503}
"""HTTP statuses by the code with which a job failed: the caller's fault or a limit. Any other code is 500."""
EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": EVENT}}, "description": "With 'stream': events."}
}


@router.post(
    "/chat/completions", response_model=ChatCompletion, responses=STREAM, summary="Ask, in OpenAI's words, and wait"
)
async def complete(
    body: Annotated[ChatBody, Body(openapi_examples=EXAMPLES)],
    request: Request,
    state: State,
    principal: Writer,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """A search stands behind every completion: ``reasoning_content`` tells what it does, ``reasoner`` has the job. The
    job is ``job_`` and the digits of the completion's id. A client that goes away cancels it; one that sent an
    ``Idempotency-Key`` does not, and gets the same job's answer when it asks again. So does a client that was sent away
    with 503 because this process ends.

    All of max_completion_tokens, reasoning.max_tokens and thinking.budget_tokens bound the job's tokens, and the
    smallest holds; an effort is a budget and a strategy by name. strategy, budget, verifier, answer, confidence,
    deterministic, priority and webhook are those of ``POST /v1/jobs``.
    """
    spec = body.to_job(body.to_messages(), state.settings)
    idempotency = await read_idempotency(idempotency_key, request)
    job, _ = await submit_job(spec, principal, state, idempotency=idempotency)
    summary = body.reasoning.summary if body.reasoning else None
    story = Narration(job["spec"], concise=summary == "concise")
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        told = chunks(job, story, state.store.follow(job["id"]), usage=usage)
        leave = partial(cancel_abandoned_job, state.store, job["id"], story) if idempotency is None else None
        return EventStream(_as_events(told), leave)
    try:
        end = await ended(request, state.store, job["id"], story, returns=idempotency is not None)
    except ClientDisconnected:
        return Response(status_code=499)
    if end is None or end.result is None or end.status == "cancelled":
        raise _failure(end)
    return JSONResponse(completion(job, story, end).model_dump())


async def _as_events(data: AsyncIterator[str]) -> AsyncIterator[str]:
    async for part in data:
        yield f"data: {part}\n\n"


def _failure(end: End | None) -> Problem:
    """OpenAI's clients repeat what failed by itself; a search that was paid for is not to be repeated unasked."""
    headers = {"x-should-retry": "false"}
    if end is None or end.error is None:
        return Problem(409, "cancelled", "the job was cancelled or deleted while it ran", headers=headers)
    return Problem(
        _STATUS.get(end.error.code, 500), end.error.code.replace("_", "-"), end.error.message, headers=headers
    )
