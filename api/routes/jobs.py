"""``/v1/jobs``: submit, look, wait, follow, cancel, retry, delete."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from api.http.idempotency import IdempotencyKey, idempotency_of
from api.http.principal import Known, Reader, Writer
from api.http.problems import Problem, ProblemDocument
from api.http.request_parsing import JsonRoute
from api.http.search_tree import Tree, fold
from api.http.state import State, service
from api.http.submission import submit_job
from api.openai.streaming import EventStream
from reasoner.jobs.event import MAX_SEQ, Event
from reasoner.jobs.job import TERMINAL_STATUSES, Job, Status
from reasoner.jobs.spec import JobSpec
from workers.store.jobs import NoSuchJob, ShuttingDown

MAX_WAIT_SECONDS = 60
EVENT = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
}
_EVENT_ID = re.compile(r"[0-9]{1,18}")
_JOB_ID = re.compile(r"job_[0-9a-f]{32}")
_PREFER_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6})\"?(?=$|[,;\s])")

Service = Annotated[State, Depends(service)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for the job to end.")]

router = APIRouter(
    prefix="/v1/jobs", route_class=JsonRoute, tags=["jobs"], responses={"default": {"model": ProblemDocument}}
)


class JobPage(BaseModel):
    """``last_id`` is what ``after`` takes to get the next page."""

    data: list[Job]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def job_id_of(
    job_id: Annotated[str, Path(description="What POST /v1/jobs answered as 'id'.")], state: Service, caller: Known
) -> str:
    """The one way of an id into a route: only what looks like one may become part of a key in the store, and a job
    that the caller may not see is a job that there is not."""
    if not _JOB_ID.fullmatch(job_id):
        raise NoSuchJob(job_id)
    await state.store.check_owner(job_id, caller.sees)
    return job_id


JobId = Annotated[str, Depends(job_id_of)]


@router.post(
    "",
    status_code=202,
    response_model=Job,
    responses={200: {"model": Job, "description": "With 'Prefer: wait=N', when it has ended by then"}},
    summary="Submit a job",
)
async def submit(
    spec: JobSpec,
    request: Request,
    state: Service,
    caller: Writer,
    prefer: Annotated[
        str | None, Header(description="'wait=N' answers when the job has ended or after N seconds.")
    ] = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    idempotency = await idempotency_of(idempotency_key, request)
    job, created = await submit_job(spec, caller, state, idempotency=idempotency)
    headers = {"Location": f"/v1/jobs/{job['id']}"}
    if not created:
        headers["Idempotency-Replayed"] = "true"
    wait = _PREFER_WAIT.search(prefer or "")
    if wait:
        seconds = min(int(wait[1]), MAX_WAIT_SECONDS)
        headers["Preference-Applied"] = f"wait={seconds}"
        job = await state.store.wait(job["id"], seconds)
    return JSONResponse(job, 200 if wait and job["status"] in TERMINAL_STATUSES else 202, headers)


@router.get("", response_model=JobPage, summary="List jobs, newest first")
async def page(
    state: Service,
    caller: Reader,
    after: Annotated[str | None, Query(description="The 'last_id' of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    status: Annotated[
        Literal[Status, "dead"] | None,
        Query(description="'dead' are the failed jobs that lost their worker too often without a step forward."),
    ] = None,
) -> Response:
    try:
        jobs = await state.store.page(owner=caller.sees, after=after, limit=limit + 1, status=status)
    except NoSuchJob:
        message = f"there is no job {after!r}: give the 'last_id' of the page before"
        raise Problem(400, "unknown-cursor", message, errors=[("after", message)]) from None
    shown = jobs[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return JSONResponse({"data": shown, "first_id": first, "last_id": last, "has_more": len(jobs) > limit})


@router.get("/{job_id}", response_model=Job, summary="Look at a job, or wait for its end")
async def show(_: Reader, job_id: JobId, state: Service, wait: Wait = 0) -> Response:
    return JSONResponse(await state.store.wait(job_id, wait))


async def _starting_point(
    job_id: JobId,
    state: Service,
    starting_after: Annotated[
        int | None, Query(ge=0, le=MAX_SEQ, description="Sequence number of the last event you have.")
    ] = None,
    last_event_id: Annotated[str | None, Header(description="The same, as EventSource sends it.")] = None,
) -> int:
    """Where a stream starts. Decided before the answer begins, while an error can still be told."""
    job = await state.store.get(job_id)
    after = starting_after or 0
    if last_event_id:  # a browser that reconnects repeats the first URL: its header is the newer word
        if not _EVENT_ID.fullmatch(last_event_id):
            message = f"{last_event_id[:40]!r} is not the id of an event: they are whole numbers"
            raise _bad_start("Last-Event-ID", message)
        after = int(last_event_id)
    if after > job["last_seq"]:
        raise _bad_start("starting_after", f"event {after} has not happened: the newest is {job['last_seq']}")
    if after == job["last_seq"] and job["status"] in TERMINAL_STATUSES:
        raise Problem(204, "ended", "")  # tells EventSource not to come back
    return after


@router.get(
    "/{job_id}/events",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {"itemSchema": EVENT}}},
        204: {"description": "The job has ended, and you have its last event"},
    },
    summary="Follow a job",
)
async def events(
    _: Reader, job_id: JobId, state: Service, after: Annotated[int, Depends(_starting_point)]
) -> EventStream:
    """Server-sent events with ``id`` = sequence number, gapless, resumable anywhere, ending with the job's end."""
    return EventStream(_as_text(state.store.follow(job_id, after)))


async def _as_text(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    with contextlib.suppress(ShuttingDown):  # the stream ends without the job's end: its client comes back for the rest
        async for event in events:
            # In ASCII: many clients take U+2028 or U+0085 inside a text for the end of a line.
            yield f"id: {event.seq}\nevent: {event.type}\ndata: {json.dumps(event.model_dump())}\n\n"


@router.get("/{job_id}/tree", summary="The search tree so far")
async def tree(_: Reader, job_id: JobId, state: Service) -> Tree:
    await state.store.get(job_id)
    return fold(job_id, await state.store.events(job_id))


@router.post(
    "/{job_id}/cancel",
    response_model=Job,
    responses={202: {"model": Job, "description": "Its worker is being told"}},
    summary="Cancel a job",
)
async def cancel(_: Writer, job_id: JobId, state: Service) -> Response:
    """200 when the job has ended (also when it had before), 202 while its worker is being told."""
    job = await state.store.cancel(job_id)
    return JSONResponse(job, 200 if job["status"] in TERMINAL_STATUSES else 202)


@router.post("/{job_id}/retry", status_code=202, response_model=Job, summary="Run a failed job again")
async def retry(job_id: JobId, state: Service, _: Writer) -> Response:
    """It goes on from its journal: what it paid for is not paid for again. Its events go on behind its failure."""
    settings = state.settings
    quota = settings.limits.of(await state.store.owner(job_id)).quota
    job = await state.store.retry(job_id, queue_cap=settings.queue_cap, quota=quota)
    state.reaper.nudge()
    return JSONResponse(job, 202)


@router.delete("/{job_id}", status_code=204, summary="Delete a job that has ended")
async def delete(_: Writer, job_id: JobId, state: Service) -> None:
    await state.store.delete(job_id)


def _bad_start(field: str, message: str) -> Problem:
    return Problem(400, "bad-start", message, errors=[(field, message)])
