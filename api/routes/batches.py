"""``/v1/batches``: many jobs under one budget."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api.http.idempotency import IdempotencyKey, idempotency_of
from api.http.principal import Known, Reader, Writer
from api.http.problems import Problem, ProblemDocument
from api.http.request_parsing import JsonRoute
from api.http.state import State, service
from api.http.submission import submit_batch
from reasoner.jobs.batch import Batch, BatchSpec
from workers.store.batches import BatchStore, NoSuchBatch

_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")

Service = Annotated[State, Depends(service)]

router = APIRouter(
    prefix="/v1/batches", route_class=JsonRoute, tags=["batches"], responses={"default": {"model": ProblemDocument}}
)

EXAMPLE = {
    "summary": "Two problems, one budget",
    "value": {
        "jobs": [
            {"problem": "Use the numbers 3, 5, 7 to make 26.", "strategy": {"name": "weighted_vote", "n": 64}},
            {
                "problem": "Use the numbers 2, 4, 9 to make 34.",
                "strategy": {"name": "weighted_vote", "n": 64},
                "budget": {"tokens": 1500},
            },
        ],
        "budget": {"tokens": 2000},
        "metadata": {"course": "numbers"},
    },
}


class BatchPage(BaseModel):
    """``last_id`` is what ``after`` takes to get the next page."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def batch_id_of(
    batch_id: Annotated[str, Path(description="What POST /v1/batches answered as 'id'.")],
    state: Service,
    caller: Known,
) -> str:
    """As ``api.routes.jobs.job_id_of``."""
    if not _BATCH_ID.fullmatch(batch_id):
        raise NoSuchBatch(batch_id)
    await BatchStore(state.store).check_owner(batch_id, caller.sees)
    return batch_id


BatchId = Annotated[str, Depends(batch_id_of)]


@router.post("", status_code=202, response_model=Batch, summary="Submit jobs that share a budget")
async def submit(
    spec: Annotated[BatchSpec, Body(openapi_examples={"batch": EXAMPLE})],
    request: Request,
    state: Service,
    caller: Writer,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Every job is granted a quarter of an even share at once. The rest goes, slice by slice, to the job that promises
    the largest gain per token; all together never spend more than the budget. The jobs are jobs like any other:
    ``GET /v1/jobs/{id}`` and its events and tree show them. A job's own budget caps its part.
    """
    idempotency = await idempotency_of(idempotency_key, request)
    batch, created = await submit_batch(spec, caller, state, idempotency=idempotency)
    headers = {"Location": f"/v1/batches/{batch['id']}"}
    if not created:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(batch, 202, headers)


@router.get("", response_model=BatchPage, summary="List batches, newest first, without their jobs")
async def page(
    state: Service,
    caller: Reader,
    after: Annotated[str | None, Query(description="The 'last_id' of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    try:
        batches = await BatchStore(state.store).page(owner=caller.sees, after=after, limit=limit + 1)
    except NoSuchBatch:
        message = f"there is no batch {after!r}: give the 'last_id' of the page before"
        raise Problem(400, "unknown-cursor", message, errors=[("after", message)]) from None
    shown = batches[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return JSONResponse({"data": shown, "first_id": first, "last_id": last, "has_more": len(batches) > limit})


@router.get("/{batch_id}", response_model=Batch, summary="Look at a batch and its jobs")
async def show(_: Reader, batch_id: BatchId, state: Service) -> Response:
    return JSONResponse(await BatchStore(state.store).get(batch_id))


@router.post(
    "/{batch_id}/cancel",
    response_model=Batch,
    responses={202: {"model": Batch, "description": "Workers are being told"}},
    summary="Cancel all jobs of a batch",
)
async def cancel(_: Writer, batch_id: BatchId, state: Service) -> Response:
    """200 when all have ended, 202 while workers are being told."""
    batch = await BatchStore(state.store).cancel(batch_id)
    return JSONResponse(batch, 200 if batch["finished_at"] is not None else 202)
