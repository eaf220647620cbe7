"""Route of ``POST /v1/chat/completions``: submits a job and waits for its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import JSONResponse

from api.conversation.failures import failure_problem
from api.conversation.narration import Narration
from api.conversation.sent_fields import naming_sent_fields
from api.conversation.streaming import ClientDisconnected, EventStream, cancel_abandoned_job, wait_for_end
from api.http.principal import Writer
from api.http.request_parsing import IdempotencyKey, JsonRoute, read_idempotency
from api.http.state import State
from api.http.submission import submit_job
from api.openai.chat.answer import ChatCompletion, build_completion, stream_chunks
from api.openai.chat.body import ChatBody
from api.openai.errors import ErrorDocument

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
        "summary": "A chosen strategy, as a stream",
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
EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": EVENT}}, "description": "With 'stream': events."}
}


@router.post("/chat/completions", response_model=ChatCompletion, responses=STREAM, summary="Create a chat completion")
async def complete(
    body: Annotated[ChatBody, Body(openapi_examples=EXAMPLES)],
    request: Request,
    state: State,
    principal: Writer,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Every completion is the result of a job. ``reasoning_content`` is the thought of the chosen solution, or
    describes the search if the model does not think. ``reasoner`` has the job, whose id is ``job_`` and the digits of
    the completion's id. If the client disconnects, its job is cancelled. A request with an ``Idempotency-Key`` keeps
    its job: sent again, also after a 503 because this process shuts down, it gets the answer of the same job.

    max_completion_tokens, reasoning.max_tokens and thinking.budget_tokens all bound the tokens of the job, and the
    smallest holds. An effort is a budget and a strategy by name. strategy, budget, verifier, answer, confidence,
    deterministic, priority and webhook are those of ``POST /v1/jobs``.
    """
    turns = body.to_turns()
    idempotency = await read_idempotency(idempotency_key, request)
    with naming_sent_fields(body.sent_fields(turns)):
        served = await state.catalog.list_known()
        job_request = body.to_job([turn.message for turn in turns], state.settings, served)
        job, _ = await submit_job(job_request, principal, state, idempotency=idempotency)
    summary = body.reasoning.summary if body.reasoning else None
    narration = Narration(job["spec"], concise=summary == "concise")
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        data = stream_chunks(job, narration, state.store.follow(job["id"]), usage=usage, wanted=body.reasoning_content)
        on_close = partial(cancel_abandoned_job, state.store, job["id"], narration) if idempotency is None else None
        return EventStream(_format_events(data), on_close)
    try:
        end = await wait_for_end(request, state.store, job["id"], narration, outlives_client=idempotency is not None)
    except ClientDisconnected:
        return Response(status_code=499)
    if end is None or end.result is None or end.status == "cancelled":
        raise failure_problem(end)
    return JSONResponse(build_completion(job, narration, end, body.reasoning_content).model_dump())


async def _format_events(data: AsyncIterator[str]) -> AsyncIterator[str]:
    async for part in data:
        yield f"data: {part}\n\n"
