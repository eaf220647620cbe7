"""Routes of ``/v1/batches``: the lines of a file, as OpenAI's clients submit them, or jobs under one budget."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Path, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Tag

from api.batches.endpoints import check_endpoint
from api.http.pagination import After, Limit, Page, build_page, unknown_cursor
from api.http.principal import AnyPrincipal, Reader, Writer
from api.http.request_parsing import IdempotencyKey, JsonRoute, check_query_parameters, read_idempotency
from api.http.state import State
from api.http.submission import submit_batch, submit_file_batch
from api.openai.errors import ErrorDocument
from reasoner.jobs.batch import ENDED, Batch, BatchSpec, FileBatchSpec
from workers.store.batches import BatchStore, NoSuchBatch

_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")

router = APIRouter(
    prefix="/v1/batches",
    route_class=JsonRoute,
    tags=["batches"],
    responses={"default": {"model": ErrorDocument}},
    dependencies=[Depends(check_query_parameters)],
)

EXAMPLES: dict[str, Any] = {
    "jobs": {
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
    },
    "file": {
        "summary": "The lines of a file, under one budget",
        "value": {
            "input_file_id": "file-7c5f0a9e3b2d4168a1c09d8e7f6b5a43",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"budget_tokens": "2000000", "strategy": "weighted_vote"},
        },
    },
}


def _find_kind(body: Any) -> str:
    return "jobs" if isinstance(body, BatchSpec) or (isinstance(body, dict) and "jobs" in body) else "file"


NewBatch = Annotated[
    Annotated[BatchSpec, Tag("jobs")] | Annotated[FileBatchSpec, Tag("file")], Discriminator(_find_kind)
]


class BatchPage(Page[Batch]):
    object: Literal["list"] = "list"


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


@router.post(
    "",
    response_model=Batch,
    responses={202: {"model": Batch, "description": "Of given jobs"}},
    summary="Submit the lines of a file, or jobs that share a budget",
)
async def submit(
    spec: Annotated[NewBatch, Body(openapi_examples=EXAMPLES)],
    request: Request,
    state: State,
    principal: Writer,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """OpenAI's batch of a file: each line has a ``custom_id``, ``method``, ``url`` (the batch's endpoint) and ``body``.
    Its answer is a line of the output file, in the same order; a line without an answer is one of the error file. Or
    ``jobs``, the bodies of ``POST /v1/jobs``, with a budget; that is answered with 202.

    Under a shared budget every job gets a quarter of an even share at once. The rest goes, slice by slice, to the job
    with the largest expected gain per token; all together never spend more than the budget. A job's own budget caps its
    part. The jobs are jobs like any other: ``GET /v1/jobs/{id}`` and its events and tree show them.
    """
    idempotency = await read_idempotency(idempotency_key, request)
    if isinstance(spec, FileBatchSpec):
        check_endpoint(spec.endpoint)
        batch, is_new = await submit_file_batch(spec, principal, state, idempotency=idempotency)
    else:
        batch, is_new = await submit_batch(spec, principal, state, idempotency=idempotency)
    headers = {"Location": f"{state.settings.root_path}/v1/batches/{batch['id']}"}
    if not is_new:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(batch, 200 if isinstance(spec, FileBatchSpec) else 202, headers)


@router.get("", name="page", response_model=BatchPage, summary="List batches, newest first, without their jobs")
async def list_page(state: State, principal: Reader, after: After = None, limit: Limit = 20) -> Response:
    try:
        batches = await BatchStore(state.store).list_batches(
            owner=principal.visible_owner, after=after, limit=limit + 1
        )
    except NoSuchBatch:
        raise unknown_cursor("batch", after) from None
    return JSONResponse({"object": "list"} | build_page(batches, limit))


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
    """200 when all jobs have ended, 202 while workers are being notified. The results of a file have the answers until
    then, and an error for each other line."""
    batch = await BatchStore(state.store).cancel(batch_id)
    return JSONResponse(batch, 200 if batch["status"] in ENDED else 202)
