"""Routes of ``/v1/messages``: create a message, and count the tokens of one."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.anthropic.body import MessagesBody, TokenCountBody
from api.anthropic.errors import PREFIX, AnthropicErrorDocument
from api.anthropic.events import PING, MessageReader, stream_events
from api.anthropic.job import build_job
from api.anthropic.message import Message
from api.conversation.sent_fields import naming_sent_fields
from api.conversation.streaming import ClientDisconnected, EventStream, cancel_abandoned_job, wait_for_end
from api.http.principal import Writer
from api.http.problems import RETRY_AFTER, Problem
from api.http.request_parsing import IdempotencyKey, JsonRoute, read_idempotency
from api.http.state import State
from api.http.submission import check_models, submit_job
from engine.protocol.types import EngineError, InvalidRequest
from reasoner.admission.resolve import resolve_job

router = APIRouter(
    prefix=PREFIX, route_class=JsonRoute, tags=["anthropic"], responses={"default": {"model": AnthropicErrorDocument}}
)

PROBLEM = "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 24."
QUESTION: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": PROBLEM}]}
EXAMPLES: dict[str, Any] = {
    "plain": {
        "summary": "A question, with an effort",
        "value": QUESTION | {"max_tokens": 4000, "output_config": {"effort": "medium"}},
    },
    "search": {
        "summary": "A chosen strategy, as a stream with the narration of the search",
        "value": QUESTION
        | {"max_tokens": 4000, "strategy": {"name": "beam", "n": 16}, "thinking": {"type": "adaptive"}, "stream": True},
    },
}
COUNT_EXAMPLES: dict[str, Any] = {
    "plain": {"summary": "A question with a system message", "value": QUESTION | {"system": "You are brief."}}
}
EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": EVENT}}, "description": "With 'stream': events."}
}


class TokenCount(BaseModel):
    input_tokens: int


@router.post("", response_model=Message, responses=STREAM, summary="Create a message")
async def create(
    body: Annotated[MessagesBody, Body(openapi_examples=EXAMPLES)],
    request: Request,
    state: State,
    principal: Writer,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Every message is the chosen solution of a job, whose id is ``job_`` and the digits of the message's id. If the
    client disconnects, its job is cancelled, unless the request had an ``Idempotency-Key``: sent again, it gets the
    answer of the same job.

    max_tokens bounds the tokens of the job, thinking.budget_tokens the thought of each solution. An effort is a budget
    and a strategy by name. strategy, budget, verifier, answer, confidence, seed, deterministic, priority and webhook
    are those of ``POST /v1/jobs``.
    """
    turns = body.to_turns()
    idempotency = await read_idempotency(idempotency_key, request)
    with naming_sent_fields(body.sent_fields(turns)):
        job_request = await build_job(body, turns, state)
        job, _ = await submit_job(job_request, principal, state, idempotency=idempotency)
    reader = MessageReader(job, body.display, body.reasoning_content)
    if body.stream:
        events = stream_events(job, reader, state.store.follow(job["id"]), request.state.request_id)
        on_close = partial(cancel_abandoned_job, state.store, job["id"], reader) if idempotency is None else None
        return EventStream(events, on_close, keep_alive=PING)
    try:
        await wait_for_end(request, state.store, job["id"], reader, outlives_client=idempotency is not None)
    except ClientDisconnected:
        return Response(status_code=499)
    return JSONResponse(reader.build_message().model_dump())


@router.post("/count_tokens", summary="Count the tokens of a message")
async def count_tokens(
    body: Annotated[TokenCountBody, Body(openapi_examples=COUNT_EXAMPLES)], state: State, principal: Writer
) -> TokenCount:
    """The tokens of the prompt that the model would get: its chat template, the system message, tools and all turns.
    Nothing is generated. A search sends the prompt once for each of its branches, mostly from the cache."""
    turns = body.to_turns()
    with naming_sent_fields(body.sent_fields(turns)):
        served = await state.catalog.list_known()
        job_request = body.to_job([turn.message for turn in turns], state.settings, served)
        check_models(job_request, principal)
        spec = await resolve_job(job_request, state.settings, state.catalog)
    try:
        count = await state.catalog.count_prompt_tokens(spec)
    except InvalidRequest as error:
        raise Problem(422, "invalid-request", str(error)) from None
    except EngineError as error:
        raise Problem(503, "engine-unavailable", str(error), headers=RETRY_AFTER) from None
    return TokenCount(input_tokens=count)
