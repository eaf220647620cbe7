"""Routes of ``/v1/jobs``: submit, list, show, wait, follow, cancel, retry and delete."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from api.conversation.streaming import EventStream
from api.http.pagination import After, Limit, Page, build_listing, unknown_cursor
from api.http.principal import AnyPrincipal, Principal, Reader, Writer
from api.http.problems import Problem, ProblemDocument
from api.http.request_parsing import IdempotencyKey, JsonRoute, check_query_parameters, read_idempotency
from api.http.search_tree import Tree, build_tree
from api.http.state import ServiceState, State
from api.http.submission import check_word, submit_job
from api.routes.job_query import METADATA_PARAMETER, read_filter, read_owner
from reasoner.jobs.events import MAX_SEQ, Event
from reasoner.jobs.job import TERMINAL_STATUSES, Job
from reasoner.jobs.request import JobRequest
from reasoner.jobs.view import fold_events
from workers.archive.filters import JobFilter
from workers.store.event_log import ShuttingDown
from workers.store.jobs import NoSuchJob

MAX_WAIT_SECONDS = 60
EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "event": {"type": "string"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/JobEvent"},
        },
    },
}
_EVENT_ID = re.compile(r"[0-9]{1,18}")
_JOB_ID = re.compile(r"job_[0-9a-f]{32}")
_PREFER_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6})\"?(?=$|[,;\s])")

Prefer = Annotated[str | None, Header(description="'wait=N' answers when the job has ended or after N seconds.")]
ENDED: dict[int | str, dict[str, Any]] = {
    200: {"model": Job, "description": "With 'Prefer: wait=N', when it has ended by then"}
}
"""Response of a submission that waited for the end."""
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for the job to end.")]

router = APIRouter(
    prefix="/v1/jobs",
    route_class=JsonRoute,
    tags=["jobs"],
    responses={"default": {"model": ProblemDocument}},
    dependencies=[Depends(check_query_parameters)],
)


class JobPage(Page[Job]):
    pass


async def check_job_id(
    job_id: Annotated[str, Path(description="The 'id' in the answer of POST /v1/jobs.")],
    state: State,
    principal: AnyPrincipal,
) -> str:
    """Return the id of a job that the principal may see. Raises ``NoSuchJob``, also for jobs of other owners.

    Only a well-formed id may become part of a Redis key.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise NoSuchJob(job_id)
    await state.store.check_owner(job_id, principal.visible_owner)
    return job_id


JobId = Annotated[str, Depends(check_job_id)]


@router.post("", status_code=202, response_model=Job, responses=ENDED, summary="Submit a job")
async def submit(
    job_request: JobRequest,
    request: Request,
    state: State,
    principal: Writer,
    prefer: Prefer = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    return await submit_and_wait(
        job_request, request, state=state, principal=principal, prefer=prefer, idempotency_key=idempotency_key
    )


async def submit_and_wait(
    job_request: JobRequest,
    request: Request,
    state: ServiceState,
    principal: Principal,
    prefer: str | None,
    idempotency_key: str | None,
) -> Response:
    """Submit a job and answer with it, after its end if the client prefers to wait for that."""
    idempotency = await read_idempotency(idempotency_key, request)
    job, is_new = await submit_job(job_request, principal, state, idempotency=idempotency)
    headers = {"Location": f"{state.settings.root_path}/v1/jobs/{job['id']}"}
    if not is_new:
        headers["Idempotency-Replayed"] = "true"
    wait = _PREFER_WAIT.search(prefer or "")
    if wait:
        seconds = min(int(wait[1]), MAX_WAIT_SECONDS)
        headers["Preference-Applied"] = f"wait={seconds}"
        job = await state.store.wait_for_end(job["id"], seconds)
    return JSONResponse(job, 200 if wait and job["status"] in TERMINAL_STATUSES else 202, headers)


@router.get(
    "",
    name="page",
    response_model=JobPage,
    openapi_extra={"parameters": [METADATA_PARAMETER]},
    summary="List jobs, newest first",
)
async def list_page(
    state: State,
    wanted: Annotated[JobFilter, Depends(read_filter)],
    owner: Annotated[str | None, Depends(read_owner)],
    after: After = None,
    limit: Limit = 20,
) -> Response:
    """All filters that are given hold. While the archive of ended jobs is away, its jobs are missing, and the header
    'Reasoner-Warning' says so. A page may have fewer jobs than 'limit' although 'has_more' is true."""
    try:
        listing = await state.store.list_jobs(wanted, owner=owner, after=after, limit=limit)
    except NoSuchJob:
        raise unknown_cursor("job", after) from None
    headers = None if listing.outage is None else {"Reasoner-Warning": f"archive-unavailable: {listing.outage}"}
    return JSONResponse(build_listing(listing), headers=headers)


@router.get("/{job_id}", response_model=Job, summary="Show a job, or wait for its end")
async def show(_: Reader, job_id: JobId, state: State, wait: Wait = 0) -> Response:
    return JSONResponse(await state.store.wait_for_end(job_id, wait))


async def _first_event(
    job_id: JobId,
    state: State,
    starting_after: Annotated[
        int | None, Query(ge=0, le=MAX_SEQ, description="Sequence number of the last event you have.")
    ] = None,
    last_event_id: Annotated[str | None, Header(description="The same, as EventSource sends it.")] = None,
) -> int:
    """Return the number of the event after which a stream starts.

    A dependency, so that an error is raised before the response begins.
    """
    job = await state.store.get(job_id)
    after = starting_after or 0
    if last_event_id:  # EventSource reconnects with the first URL; its header is more recent
        if not _EVENT_ID.fullmatch(last_event_id):
            message = f"{last_event_id[:40]!r} is not the id of an event: give the number of the last event received"
            raise _bad_start_problem("Last-Event-ID", message)
        after = int(last_event_id)
    if after > job["last_seq"]:
        raise _bad_start_problem("starting_after", f"event {after} does not exist yet: the newest is {job['last_seq']}")
    if after == job["last_seq"] and job["status"] in TERMINAL_STATUSES:
        raise Problem(204, "ended", "")  # EventSource does not reconnect after 204
    return after


@router.get(
    "/{job_id}/events",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {"itemSchema": EVENT}}},
        204: {"description": "The job has ended, and there are no more events"},
    },
    summary="Follow a job",
)
async def events(_: Reader, job_id: JobId, state: State, after: Annotated[int, Depends(_first_event)]) -> EventStream:
    """Server-sent events; ``id`` is the sequence number, without gaps. The stream can be resumed after any event and
    ends when the job does."""
    return EventStream(_format_events(state.store.follow(job_id, after)))


async def _format_events(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    with contextlib.suppress(ShuttingDown):  # the stream ends before the job does, and its client reconnects
        async for event in events:
            # ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
            yield f"id: {event.seq}\nevent: {event.type}\ndata: {json.dumps(event.model_dump())}\n\n"


@router.get("/{job_id}/tree", summary="The search tree so far")
async def tree(_: Reader, job_id: JobId, state: State) -> Tree:
    await state.store.get(job_id)
    return build_tree(job_id, fold_events(await state.store.load_events(job_id)))


@router.post(
    "/{job_id}/cancel",
    response_model=Job,
    responses={202: {"model": Job, "description": "Its worker is being notified"}},
    summary="Cancel a job",
)
async def cancel(_: Writer, job_id: JobId, state: State) -> Response:
    """200 when the job has ended (now or earlier), 202 while its worker is being notified."""
    job = await state.store.cancel(job_id)
    return JSONResponse(job, 200 if job["status"] in TERMINAL_STATUSES else 202)


@router.post("/{job_id}/retry", status_code=202, response_model=Job, summary="Run a failed job again")
async def retry(job_id: JobId, state: State, principal: Writer) -> Response:
    """The job continues from its journal and pays for nothing twice. Its events continue after the failure."""
    settings, spec = state.settings, (await state.store.get(job_id))["spec"]
    check_word("model", spec.get("name") or spec["model"], principal)
    quota = settings.limits.for_owner(await state.store.get_owner(job_id)).quota
    job = await state.store.retry(job_id, queue_cap=settings.queue_cap, quota=quota)
    return JSONResponse(job, 202)


@router.delete("/{job_id}", status_code=204, summary="Delete a job that has ended")
async def delete(_: Writer, job_id: JobId, state: State) -> None:
    await state.store.delete(job_id)


def _bad_start_problem(field: str, message: str) -> Problem:
    return Problem(400, "bad-start", message, errors=[(field, message)])
