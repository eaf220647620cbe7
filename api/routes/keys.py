"""Routes of ``/v1/keys``: make, list and revoke API keys."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path

from api.http.pagination import After, Limit, Page, build_page, unknown_cursor
from api.http.principal import Admin
from api.http.problems import ProblemDocument
from api.http.request_parsing import JsonRoute, check_query_parameters
from api.http.state import State
from workers.store.keys import Key, KeySpec, KeyStore, NewKey, NoSuchKey

_KEY_ID = re.compile(r"key_[0-9a-f]{16}")

router = APIRouter(
    prefix="/v1/keys",
    route_class=JsonRoute,
    tags=["keys"],
    responses={"default": {"model": ProblemDocument}},
    dependencies=[Depends(check_query_parameters)],
)

EXAMPLE = {
    "summary": "A key for a month",
    "value": {"name": "notebook", "owner": "ann", "scopes": ["jobs:read", "jobs:write"], "expires_in": 2_592_000},
}


class KeyPage(Page[Key]):
    pass


def check_key_id(key_id: Annotated[str, Path(description="The 'id' in the answer of POST /v1/keys.")]) -> str:
    """Return a well-formed id: no other text may become part of a Redis key. Raises ``NoSuchKey``."""
    if not _KEY_ID.fullmatch(key_id):
        raise NoSuchKey(key_id)
    return key_id


KeyId = Annotated[str, Depends(check_key_id)]


@router.post("", status_code=201, summary="Make a key")
async def create(spec: Annotated[KeySpec, Body(openapi_examples={"key": EXAMPLE})], state: State, _: Admin) -> NewKey:
    """The answer alone contains the key: the service stores a hash. The first key ends access without one."""
    return await KeyStore(state.store).create(spec)


@router.get("", name="page", summary="List keys, newest first")
async def list_page(state: State, _: Admin, after: After = None, limit: Limit = 20) -> KeyPage:
    try:
        keys = await KeyStore(state.store).list_keys(after=after, limit=limit + 1)
    except NoSuchKey:
        raise unknown_cursor("key", after) from None
    return KeyPage.model_validate(build_page([key.model_dump() for key in keys], limit))


@router.get("/{key_id}", summary="Look at a key")
async def show(_: Admin, key_id: KeyId, state: State) -> Key:
    return await KeyStore(state.store).get(key_id)


@router.delete("/{key_id}", summary="Revoke a key")
async def revoke(_: Admin, key_id: KeyId, state: State) -> Key:
    """The key is refused from now on; jobs that it submitted stay with their owner. Revoking twice changes nothing."""
    return await KeyStore(state.store).revoke(key_id)
