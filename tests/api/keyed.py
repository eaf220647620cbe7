"""A service with API keys, for tests."""

from __future__ import annotations

from typing import Any

import httpx

from workers.store.jobs import JobStore
from workers.store.keys import KeySpec, KeyStore, Scope

CLIENT: tuple[Scope, ...] = ("jobs:read", "jobs:write")


async def header(store: JobStore, owner: str, *scopes: Scope, **more: Any) -> dict[str, str]:
    """Create a key and return its header."""
    spec = KeySpec(name=f"{owner}'s", owner=owner, scopes=list(scopes or CLIENT), **more)
    return {"Authorization": f"Bearer {(await KeyStore(store).create(spec)).key}"}


async def submitted(client: httpx.AsyncClient, headers: dict[str, str], **spec: Any) -> str:
    """Submit a job and return its id."""
    response = await client.post("/v1/jobs", json={"problem": "1 + 1?", **spec}, headers=headers)
    assert response.status_code == 202, response.text
    return str(response.json()["id"])
