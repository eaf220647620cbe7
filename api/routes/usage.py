"""Route of ``/v1/usage``: tokens and cost by owner and day."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel

from api.http.principal import Reader
from api.http.problems import ProblemDocument
from api.http.request_parsing import JsonRoute, check_query_parameters
from api.http.state import State
from workers.store.reaping import DailyUsage

MAX_DAYS = 100

router = APIRouter(
    prefix="/v1/usage",
    route_class=JsonRoute,
    tags=["service"],
    responses={"default": {"model": ProblemDocument}},
    dependencies=[Depends(check_query_parameters)],
)


class UsageList(BaseModel):
    data: list[DailyUsage]


@router.get("", summary="Tokens and cost by owner and day")
async def usage(
    state: State,
    principal: Reader,
    days: Annotated[int, Query(ge=1, le=MAX_DAYS, description="Days up to today (UTC).")] = 14,
) -> UsageList:
    """A job is counted with all that it has spent on the day on which it ends, today first. Keys without the scope
    ``admin`` see their own owner's."""
    return UsageList(data=await state.store.get_usage(days, principal.visible_owner))
