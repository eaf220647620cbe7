"""Route of ``/v1/select``: rank candidates that the client brings. The job is one of ``/v1/jobs``."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from api.http.principal import Writer
from api.http.problems import ProblemDocument
from api.http.request_parsing import IdempotencyKey, JsonRoute, check_query_parameters
from api.http.state import State
from api.routes.jobs import ENDED, Prefer, submit_and_wait
from reasoner.jobs.job import Job
from reasoner.jobs.request import Selection

router = APIRouter(
    prefix="/v1/select",
    route_class=JsonRoute,
    tags=["jobs"],
    responses={"default": {"model": ProblemDocument}},
    dependencies=[Depends(check_query_parameters)],
)


@router.post("", status_code=202, response_model=Job, responses=ENDED, summary="Rank your own candidates")
async def select(
    selection: Selection,
    request: Request,
    state: State,
    principal: Writer,
    prefer: Prefer = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """A job like any other, whose result has a 'ranking' of the candidates; no solution is written."""
    return await submit_and_wait(
        selection.to_job(), request, state=state, principal=principal, prefer=prefer, idempotency_key=idempotency_key
    )
