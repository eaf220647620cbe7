"""``GET /v1/jobs/export``: what has ended, as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from api.http.principal import Reader
from api.http.problems import ProblemDocument
from api.http.state import State, service
from reasoner.jobs.job import TERMINAL_STATUSES, Status
from workers.store.jobs import JobStore, NoSuchJob

MAX_TIME = 1e11
"""Seconds since the epoch: three thousand years on."""

Service = Annotated[State, Depends(service)]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses={"default": {"model": ProblemDocument}})


@router.get(
    "/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
    summary="Export jobs that have ended",
)
async def export(
    state: Service,
    caller: Reader,
    since: Annotated[
        float,
        Query(
            ge=0, le=MAX_TIME, description="Jobs that ended then or later; the 'finished_at' of the last line goes on."
        ),
    ] = 0.0,
    status: Annotated[Status | None, Query(description="Only jobs that ended like this.")] = None,
    journal: Annotated[bool, Query(description="With all events of each job as its 'events'.")] = False,
) -> StreamingResponse:
    """One job a line (JSON Lines), in the order of their ends, up to those that had ended when it was asked. To keep
    jobs for longer than the service does, ask regularly: a job at the seam may come twice, none is left out.
    """
    until = await state.store.now()  # also: while the broker is away, this is the time to say so
    return StreamingResponse(
        _lines(state.store, caller.sees, since, until, status, journal),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="jobs.jsonl"'},
    )


async def _lines(
    store: JobStore, owner: str | None, since: float, until: float, status: str | None, journal: bool
) -> AsyncIterator[str]:
    async for job_id in store.ended(owner, since, until):
        try:
            job = await store.get(job_id)
        except NoSuchJob:  # deleted meanwhile
            continue
        if job["status"] not in TERMINAL_STATUSES or (status is not None and job["status"] != status):
            continue  # it is retried, or another kind is asked for
        if journal:
            job["events"] = [event.model_dump() for event in await store.events(job_id)]
        yield json.dumps(job, separators=(",", ":")) + "\n"
