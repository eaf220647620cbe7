"""``/v1/responses``: a job, with or without its client on the line, in the words of OpenAI's Responses."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Path, Query, Request
from fastapi import Response as HttpResponse
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from api.http.principal import AnyPrincipal, Principal, Reader, Writer
from api.http.problems import Problem
from api.http.request_parsing import IdempotencyKey, JsonRoute, read_idempotency
from api.http.state import State
from api.http.submission import submit_job
from api.openai.chat.routes import PROBLEM, STREAM
from api.openai.errors import ErrorDocument
from api.openai.narration import Narration
from api.openai.responses.body import Form, ResponseBody
from api.openai.responses.events import ResponseEvents, behind, last_sequence_number
from api.openai.responses.items import InputItems, ListItems, input_items
from api.openai.responses.object import Response, response_id
from api.openai.streaming import ClientDisconnected, EventStream, cancel_abandoned_job, ended
from reasoner.answers.extraction.extract import strip_thinking
from reasoner.base_model import StrictModel
from reasoner.jobs.event import MAX_SEQ
from reasoner.jobs.job import TERMINAL_STATUSES
from reasoner.jobs.spec import JobSpec, Message
from workers.store.jobs import NoSuchJob
from workers.store.serialization import JobDocument

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
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
    """How to look at a response."""

    stream: bool = Field(False, description="As events: from the first, or behind 'starting_after'.")
    starting_after: Annotated[int, Field(ge=0, le=MAX_SEQ)] | None = Field(
        None, description="Number of the last event you have."
    )
    include_obfuscation: Literal[False] | None = None


class Deleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


async def job_behind(
    response_id: Annotated[str, Path(description="What POST /v1/responses answered as 'id'.")],
    state: State,
    principal: AnyPrincipal,
) -> str:
    """As ``api.routes.jobs.job_id_of``: every job can be looked at as a response, the digits of their ids are the
    same."""
    return str((await _job_behind(response_id, state, principal))["id"])


JobId = Annotated[str, Depends(job_behind)]


@router.post("", response_model=Response, responses=STREAM, summary="Ask, in OpenAI's words")
async def create(
    body: Annotated[ResponseBody, Body(openapi_examples=EXAMPLES)],
    request: Request,
    state: State,
    principal: Writer,
    idempotency_key: IdempotencyKey = None,
) -> HttpResponse:
    """The job behind a response is ``job_`` and the digits of its id. With ``background`` the answer comes at once and
    the job runs on by itself; without, a client that goes away cancels it, unless it sent an ``Idempotency-Key`` to ask
    again by. Bounds, efforts and what is not OpenAI's are as in ``POST /v1/chat/completions``. A response lives as long
    as its job.
    """
    form = body.form
    history = [] if body.previous_response_id is None else await _history(body.previous_response_id, state, principal)
    spec = body.to_job(body.to_messages(history), state.settings)
    idempotency = await read_idempotency(idempotency_key, request)
    returns = form.background or idempotency is not None
    job, _ = await submit_job(spec, principal, state, idempotency=idempotency, form=form.model_dump_json())
    if body.stream:
        stream = ResponseEvents(job, form)
        leave = None if returns else partial(cancel_abandoned_job, state.store, job["id"], stream.story)
        return EventStream(_as_events(behind(None, stream, state.store.follow(job["id"]))), leave)
    story = Narration(job["spec"], concise=form.summary == "concise")
    if not form.background:
        try:
            if await ended(request, state.store, job["id"], story, returns=returns) is None:
                raise Problem(409, "deleted", "the response was deleted while it was made")
        except ClientDisconnected:
            return HttpResponse(status_code=499)
    return JSONResponse(Response.of(job, form, story).model_dump())


@router.get("/{response_id}", response_model=Response, responses=STREAM, summary="Look at a response, or follow it")
async def retrieve(job_id: JobId, query: Annotated[Retrieve, Query()], state: State, _: Reader) -> HttpResponse:
    """A stream may be read from its beginning or behind any of its events, as often as you like, while the response
    is being made and later."""
    job, form = await state.store.get(job_id), await _form(state, job_id)
    after = query.starting_after
    if query.stream:
        if after is not None:
            newest = last_sequence_number(ResponseEvents(job, form), await state.store.events(job_id))
            if after > newest:
                raise _bad_start(f"event {after} has not happened: the newest is {newest}")
        return EventStream(_as_events(behind(after, ResponseEvents(job, form), state.store.follow(job_id))))
    if after is not None:
        raise _bad_start("it belongs to streams: add 'stream=true'")
    return JSONResponse((await _as_it_is(state, job, form)).model_dump())


@router.get("/{response_id}/input_items", summary="What a response was asked")
async def inputs(job_id: JobId, query: Annotated[ListItems, Query()], state: State, _: Reader) -> InputItems:
    """The turns that the model was given, those of earlier responses included, newest first."""
    try:
        return input_items(await state.store.get(job_id), await _form(state, job_id), query)
    except KeyError:
        message = f"after: there is no item {query.after!r}: give the 'last_id' of the page before"
        raise Problem(400, "unknown-cursor", message, errors=[("after", message)]) from None


@router.post("/{response_id}/cancel", response_model=Response, summary="Cancel a response")
async def cancel(job_id: JobId, state: State, _: Writer) -> HttpResponse:
    """One that has ended stays as it is. While its worker is being told, its status is the old one."""
    job = await state.store.cancel(job_id)
    return JSONResponse((await _as_it_is(state, job, await _form(state, job_id))).model_dump())


@router.delete("/{response_id}", summary="Delete a response that has ended, and its job")
async def delete(job_id: JobId, state: State, _: Writer) -> Deleted:
    await state.store.delete(job_id)
    return Deleted(id=response_id(job_id))


async def _job_behind(response_id: str, state: State, principal: Principal) -> JobDocument:
    job_id = f"job_{response_id.removeprefix('resp_')}"
    try:
        if not _RESPONSE_ID.fullmatch(response_id):
            raise NoSuchJob(response_id)
        await state.store.check_owner(job_id, principal.visible_owner)
        return await state.store.get(job_id)
    except NoSuchJob:
        raise Problem(404, "no-such-response", f"there is no response {response_id!r}") from None


async def _history(response_id: str, state: State, principal: Principal) -> list[Message]:
    """The conversation that a response ended."""
    field = "previous_response_id"
    try:
        job = await _job_behind(response_id, state, principal)
    except Problem as problem:
        raise Problem(problem.status_code, problem.code, problem.detail, errors=[(field, problem.detail)]) from None
    said = strip_thinking((job["result"] or {}).get("text") or "")
    if not said:
        message = f"{response_id} is {job['status']} and has said nothing: there is nothing to go on from"
        raise Problem(422, "invalid-request", f"{field}: {message}", errors=[(field, message)])
    turns = [Message.model_validate(turn) for turn in JobSpec.model_validate(job["spec"]).to_messages()]
    instructed = (await _form(state, job["id"])).instructions is not None
    return [*turns[instructed:], Message(role="assistant", content=said)]


async def _form(state: State, job_id: str) -> Form:
    """What is kept beside the job; a job that came by another route has nothing."""
    kept = await state.store.form(job_id)
    return Form() if kept is None else Form.model_validate_json(kept)


async def _as_it_is(state: State, job: JobDocument, form: Form) -> Response:
    story = Narration(job["spec"], concise=form.summary == "concise")
    if job["status"] in TERMINAL_STATUSES:
        for event in await state.store.events(job["id"]):
            story.take(event)
    return Response.of(job, form, story)


async def _as_events(found: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    async for event in found:
        # In ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _bad_start(message: str) -> Problem:
    return Problem(400, "bad-start", f"starting_after: {message}", errors=[("starting_after", message)])
