"""Routes of ``/v1/batches``: many jobs under one budget."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Request, Response
from fastapi.responses import JSONResponse

from api.http.pagination import After, Limit, Page, build_page, unknown_cursor
from api.http.principal import AnyPrincipal, Reader, Writer
from api.http.problems import ProblemDocument
from api.http.request_parsing import IdempotencyKey, JsonRoute, check_query_parameters, read_idempotency
from api.http.state import State
from api.http.submission import submit_batch
from reasoner.jobs.batch import Batch, BatchSpec
from workers.store.batches import BatchStore, NoSuchBatch

_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")

router = APIRouter(
    prefix="/v1/batches",
    route_class=JsonRoute,
    tags=["batches"],
    responses={"default": {"model": ProblemDocument}},
    dependencies=[Depends(check_query_parameters)],
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


class BatchPage(Page[Batch]):
    pass


async def check_batch_id(
    batch_id: Annotated[str, Path(description="The 'id' in the answer of POST /v1/batches.")],
    state: State,
    principal: AnyPrincipal,
) -> str:
    """Return the id of a batch that the principal may see, as ``api.routes.jobs.check_job_id`` does for jobs."""
    if not _BATCH_ID.fullmatch(batch_id):
        raise NoSuchBatch(batch_id)
    await BatchStore(state.store).check_owner(batch_id, principal.visible_owner)
    return batch_id


BatchId = Annotated[str, Depends(check_batch_id)]


@router.post("", status_code=202, response_model=Batch, summary="Submit jobs that share a budget")
async def submit(
    spec: Annotated[BatchSpec, Body(openapi_examples={"batch": EXAMPLE})],
    request: Request,
    state: State,
    principal: Writer,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Every job gets a quarter of an even share of the budget at once. The rest goes, slice by slice, to the job with
    the largest expected gain per token; all together never spend more than the budget. The jobs are jobs like any
    other: ``GET /v1/jobs/{id}`` and its events and tree show them. A job's own budget caps its part.
    """
    idempotency = await read_idempotency(idempotency_key, request)
    batch, is_new = await submit_batch(spec, principal, state, idempotency=idempotency)
    headers = {"Location": f"{state.settings.root_path}/v1/batches/{batch['id']}"}
    if not is_new:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(batch, 202, headers)


@router.get("", name="page", response_model=BatchPage, summary="List batches, newest first, without their jobs")
async def list_page(state: State, principal: Reader, after: After = None, limit: Limit = 20) -> Response:
    try:
        batches = await BatchStore(state.store).list_batches(
            owner=principal.visible_owner, after=after, limit=limit + 1
        )
    except NoSuchBatch:
        raise unknown_cursor("batch", after) from None
    return JSONResponse(build_page(batches, limit))


@router.get("/{batch_id}", response_model=Batch, summary="Look at a batch and its jobs")
async def show(_: Reader, batch_id: BatchId, state: State) -> Response:
    return JSONResponse(await BatchStore(state.store).get(batch_id))


@router.post(
    "/{batch_id}/cancel",
    response_model=Batch,
    responses={202: {"model": Batch, "description": "Workers are being notified"}},
    summary="Cancel all jobs of a batch",
)
async def cancel(_: Writer, batch_id: BatchId, state: State) -> Response:
    """200 when all jobs have ended, 202 while workers are being notified."""
    batch = await BatchStore(state.store).cancel(batch_id)
    return JSONResponse(batch, 200 if batch["finished_at"] is not None else 202)
