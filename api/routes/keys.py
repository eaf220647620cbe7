"""``/v1/keys``: make, list and revoke API keys."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path, Query
from pydantic import BaseModel

from api.http.principal import Admin
from api.http.problems import Problem, ProblemDocument
from api.http.request_parsing import JsonRoute
from api.http.state import State, service
from workers.store.keys import Key, KeySpec, KeyStore, NewKey, NoSuchKey

_KEY_ID = re.compile(r"key_[0-9a-f]{16}")

Service = Annotated[State, Depends(service)]

router = APIRouter(
    prefix="/v1/keys", route_class=JsonRoute, tags=["keys"], responses={"default": {"model": ProblemDocument}}
)

EXAMPLE = {
    "summary": "A key for a month",
    "value": {"name": "notebook", "owner": "ann", "scopes": ["jobs:read", "jobs:write"], "expires_in": 2_592_000},
}


class KeyPage(BaseModel):
    """``last_id`` is what ``after`` takes to get the next page."""

    data: list[Key]
    first_id: str | None
    last_id: str | None
    has_more: bool


def key_id_of(key_id: Annotated[str, Path(description="What POST /v1/keys answered as 'id'.")]) -> str:
    """Only what looks like an id may become part of a key in the store."""
    if not _KEY_ID.fullmatch(key_id):
        raise NoSuchKey(key_id)
    return key_id


KeyId = Annotated[str, Depends(key_id_of)]


@router.post("", status_code=201, summary="Make a key")
async def create(spec: Annotated[KeySpec, Body(openapi_examples={"key": EXAMPLE})], state: Service, _: Admin) -> NewKey:
    """The answer alone holds the key: the service keeps a hash. The first key ends access without one."""
    return await KeyStore(state.store).create(spec)


@router.get("", summary="List keys, newest first")
async def page(
    state: Service,
    _: Admin,
    after: Annotated[str | None, Query(description="The 'last_id' of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> KeyPage:
    try:
        keys = await KeyStore(state.store).page(after=after, limit=limit + 1)
    except NoSuchKey:
        message = f"there is no key {after!r}: give the 'last_id' of the page before"
        raise Problem(400, "unknown-cursor", message, errors=[("after", message)]) from None
    shown = keys[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return KeyPage(data=shown, first_id=first, last_id=last, has_more=len(keys) > limit)


@router.get("/{key_id}", summary="Look at a key")
async def show(_: Admin, key_id: KeyId, state: Service) -> Key:
    return await KeyStore(state.store).get(key_id)


@router.delete("/{key_id}", summary="Revoke a key")
async def revoke(_: Admin, key_id: KeyId, state: Service) -> Key:
    """It is refused from now on; jobs that it submitted stay their owner's. A second time changes nothing."""
    return await KeyStore(state.store).revoke(key_id)
