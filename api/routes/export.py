"""Route of ``GET /v1/jobs/export``: jobs that have ended, as JSON Lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from api.http.principal import Reader
from api.http.problems import ProblemDocument
from api.http.request_parsing import check_query_parameters
from api.http.state import State
from reasoner.jobs.job import TERMINAL_STATUSES, Status
from workers.store.jobs import JobStore, NoSuchJob

MAX_TIME = 1e11
"""Latest time in seconds since the epoch: three thousand years from it."""

router = APIRouter(
    prefix="/v1/jobs",
    tags=["jobs"],
    responses={"default": {"model": ProblemDocument}},
    dependencies=[Depends(check_query_parameters)],
)


@router.get(
    "/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
    summary="Export jobs that have ended",
)
async def export(
    state: State,
    principal: Reader,
    since: Annotated[
        float,
        Query(
            ge=0,
            le=MAX_TIME,
            description="Only jobs that ended then or later; continue with the last line's 'finished_at'.",
        ),
    ] = 0.0,
    status: Annotated[Status | None, Query(description="Only jobs that ended with this status.")] = None,
    journal: Annotated[bool, Query(description="Add all events of each job as its 'events'.")] = False,
) -> StreamingResponse:
    """One job a line (JSON Lines), in the order in which they ended, up to the time of the request. Export regularly to
    keep jobs for longer than the service does: a job at the boundary may come twice, and none is left out.
    """
    until = await state.store.get_broker_time()  # before the response begins, since it raises while the broker is away
    return StreamingResponse(
        _iterate_lines(state.store, principal.visible_owner, since=since, until=until, status=status, journal=journal),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="jobs.jsonl"'},
    )


async def _iterate_lines(
    store: JobStore, owner: str | None, since: float, until: float, status: str | None, journal: bool
) -> AsyncIterator[str]:
    async for job_id in store.iterate_ended(owner, since, until):
        try:
            job = await store.get(job_id)
        except NoSuchJob:  # deleted in the meantime
            continue
        if job["status"] not in TERMINAL_STATUSES or (status is not None and job["status"] != status):
            continue  # being retried, or not of the requested status
        if journal:
            job["events"] = [event.model_dump() for event in await store.load_events(job_id)]
        yield json.dumps(job, separators=(",", ":")) + "\n"
