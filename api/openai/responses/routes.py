"""Routes of ``/v1/responses``: create, retrieve, list the input of, cancel and delete responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Path, Query, Request
from fastapi import Response as HttpResponse
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from api.conversation.narration import Narration
from api.conversation.sent_fields import naming_sent_fields
from api.conversation.streaming import ClientDisconnected, EventStream, cancel_abandoned_job, wait_for_end
from api.http.pagination import unknown_cursor
from api.http.principal import AnyPrincipal, Reader, Writer
from api.http.problems import Problem
from api.http.request_parsing import IdempotencyKey, JsonRoute, read_idempotency
from api.http.state import ServiceState, State
from api.http.submission import submit_job
from api.openai.chat.routes import PROBLEM, STREAM
from api.openai.errors import ErrorDocument
from api.openai.responses.body import EchoedFields, ResponseBody
from api.openai.responses.events import ResponseEvents, last_sequence_number, stream_after
from api.openai.responses.history import get_job, load_conversation, load_echoed_fields, resolve_references
from api.openai.responses.items import InputItems, ListItems, list_input_items
from api.openai.responses.object import Response, response_id
from reasoner.base_model import StrictModel
from reasoner.jobs.events import MAX_SEQ
from reasoner.jobs.job import TERMINAL_STATUSES
from workers.store.serialization import JobDocument

EXAMPLES: dict[str, Any] = {
    "plain": {
        "summary": "A question, with an effort",
        "value": {"model": "policy", "input": PROBLEM, "reasoning": {"effort": "medium"}},
    },
    "background": {
        "summary": "A search that runs on without its client",
        "value": {
            "model": "policy",
            "input": [{"role": "user", "content": PROBLEM}],
            "background": True,
            "max_output_tokens": 4000,
            "strategy": {"name": "beam", "n": 16},
        },
    },
}

router = APIRouter(
    prefix="/v1/responses", route_class=JsonRoute, tags=["openai"], responses={"default": {"model": ErrorDocument}}
)


class Retrieve(StrictModel):
    """Query parameters for retrieving a response."""

    stream: bool = Field(False, description="Stream the events: from the first, or after 'starting_after'.")
    starting_after: Annotated[int, Field(ge=0, le=MAX_SEQ)] | None = Field(
        None, description="Sequence number of the last event received."
    )
    include_obfuscation: Literal[False] | None = None


class Deleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


async def check_response_id(
    response_id: Annotated[str, Path(description="The 'id' in the answer of POST /v1/responses.")],
    state: State,
    principal: AnyPrincipal,
) -> str:
    """Return the id of the job of a response. Every job has a response, whose id has the same digits."""
    return str((await get_job(response_id, state, principal))["id"])


JobId = Annotated[str, Depends(check_response_id)]


@router.post("", response_model=Response, responses=STREAM, summary="Create a response")
async def create(
    body: Annotated[ResponseBody, Body(openapi_examples=EXAMPLES)],
    request: Request,
    state: State,
    principal: Writer,
    idempotency_key: IdempotencyKey = None,
) -> HttpResponse:
    """Every response is the result of a job, whose id is ``job_`` and the digits of the response's id; it is kept as
    long as the job. With ``background`` the answer comes at once and the job runs on its own. Otherwise the job is
    cancelled if the client disconnects, unless the request had an ``Idempotency-Key``. Token bounds, efforts and the
    fields that are not OpenAI's are as in ``POST /v1/chat/completions``.
    """
    echoed = body.echoed_fields
    previous = body.previous_response_id
    history = [] if previous is None else await load_conversation(previous, state, principal)
    turns = body.to_turns(history, await resolve_references(body.input, state, principal))
    idempotency = await read_idempotency(idempotency_key, request)
    outlives_client = echoed.background or idempotency is not None
    with naming_sent_fields(body.sent_fields(turns)):
        served = await state.catalog.list_known()
        job_request = body.to_job([turn.message for turn in turns], state.settings, served)
        job, _ = await submit_job(job_request, principal, state, idempotency=idempotency, form=echoed.model_dump_json())
    if body.stream:
        stream = ResponseEvents(job, echoed)
        on_close = None if outlives_client else partial(cancel_abandoned_job, state.store, job["id"], stream.narration)
        return EventStream(_format_events(stream_after(None, stream, state.store.follow(job["id"]))), on_close)
    narration = Narration(job["spec"], concise=echoed.summary == "concise")
    if not echoed.background:
        try:
            if await wait_for_end(request, state.store, job["id"], narration, outlives_client=outlives_client) is None:
                raise Problem(409, "deleted", "the response was deleted while its job ran")
        except ClientDisconnected:
            return HttpResponse(status_code=499)
    return JSONResponse(Response.from_job(job, echoed, narration).model_dump())


@router.get("/{response_id}", response_model=Response, responses=STREAM, summary="Retrieve a response, or stream it")
async def retrieve(job_id: JobId, query: Annotated[Retrieve, Query()], state: State, _: Reader) -> HttpResponse:
    """A stream may be read from its beginning or after any of its events, any number of times, while the job runs and
    later."""
    job, echoed = await state.store.get(job_id), await load_echoed_fields(state, job_id)
    after = query.starting_after
    if query.stream:
        if after is not None:
            newest = last_sequence_number(ResponseEvents(job, echoed), await state.store.load_events(job_id))
            if after > newest:
                raise _bad_start_problem(f"event {after} does not exist yet: the newest is {newest}")
        return EventStream(_format_events(stream_after(after, ResponseEvents(job, echoed), state.store.follow(job_id))))
    if after is not None:
        raise _bad_start_problem("it is for streams only: add 'stream=true'")
    return JSONResponse((await _current_response(state, job, echoed)).model_dump())


@router.get("/{response_id}/input_items", summary="List the input items of a response")
async def inputs(job_id: JobId, query: Annotated[ListItems, Query()], state: State, _: Reader) -> InputItems:
    """The turns of the conversation, including those of earlier responses, newest first."""
    try:
        return list_input_items(await state.store.get(job_id), await load_echoed_fields(state, job_id), query)
    except KeyError:
        raise unknown_cursor("item", query.after) from None


@router.post("/{response_id}/cancel", response_model=Response, summary="Cancel a response")
async def cancel(job_id: JobId, state: State, _: Writer) -> HttpResponse:
    """A response that has ended stays as it is. The status changes once the worker has stopped."""
    job = await state.store.cancel(job_id)
    return JSONResponse((await _current_response(state, job, await load_echoed_fields(state, job_id))).model_dump())


@router.delete("/{response_id}", summary="Delete a response that has ended, and its job")
async def delete(job_id: JobId, state: State, _: Writer) -> Deleted:
    await state.store.delete(job_id)
    return Deleted(id=response_id(job_id))


async def _current_response(state: ServiceState, job: JobDocument, echoed: EchoedFields) -> Response:
    narration = Narration(job["spec"], concise=echoed.summary == "concise")
    if job["status"] in TERMINAL_STATUSES:
        for event in await state.store.load_events(job["id"]):
            narration.add(event)
    return Response.from_job(job, echoed, narration)


async def _format_events(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    async for event in events:
        # ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _bad_start_problem(message: str) -> Problem:
    return Problem(400, "bad-start", f"starting_after: {message}", errors=[("starting_after", message)])
