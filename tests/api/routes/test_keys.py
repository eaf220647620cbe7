"""The life of an API key."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from api.http import authentication
from api.http.metrics import HTTP_STREAMS
from tests.api.conftest import serving, submitted
from tests.api.http.test_bad_input import check_problem
from tests.api.keyed import header
from tests.api.keyed import submitted as submitted_by
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings, load_settings
from workers.store.jobs import JobStore
from workers.store.keys import KeySpec, KeyStore


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_the_first_key_ends_access_without_a_key_for_good(client: httpx.AsyncClient) -> None:
    await submitted(client)
    made = (await client.post("/v1/keys", json={"name": "first", "scopes": ["admin", "jobs:read"]})).json()
    admin = bearer(made["key"])
    check_problem(await client.get("/v1/jobs"), 401)
    assert len((await client.get("/v1/jobs", headers=admin)).json()["data"]) == 1
    before = time.time()
    revoked = await client.delete(f"/v1/keys/{made['id']}", headers=admin)
    assert before - 0.001 <= revoked.json()["revoked_at"] <= time.time() + 0.001  # written in milliseconds
    check_problem(await client.get("/v1/jobs"), 401)


async def test_a_key_shows_its_owner_scopes_and_expiry(client: httpx.AsyncClient) -> None:
    spec = {"name": "notebook", "owner": "ann", "scopes": ["jobs:write", "jobs:read"], "expires_in": 60}
    made = (await client.post("/v1/keys", json=spec | {"scopes": ["admin"]})).json()
    admin = bearer(made["key"])
    response = await client.post("/v1/keys", json=spec, headers=admin)
    assert (response.status_code, response.headers["cache-control"]) == (201, "no-store")
    key = response.json()
    assert (key["name"], key["owner"], key["scopes"]) == ("notebook", "ann", ["jobs:read", "jobs:write"])
    assert key["expires_at"] - key["created_at"] == pytest.approx(60)
    shown = (await client.get(f"/v1/keys/{key['id']}", headers=admin)).json()
    assert shown == {name: value for name, value in key.items() if name != "key"}
    alone = (await client.post("/v1/keys", json={"name": "x"}, headers=admin)).json()
    assert (alone["owner"], alone["scopes"], alone["expires_at"]) == (alone["id"], ["jobs:read", "jobs:write"], None)
    page = (await client.get("/v1/keys", params={"limit": 2}, headers=admin)).json()
    assert [item["id"] for item in page["data"]] == [alone["id"], key["id"]]
    rest = (await client.get("/v1/keys", params={"after": page["last_id"]}, headers=admin)).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([made["id"]], False)


async def test_an_expired_or_revoked_key_gets_the_reason_and_an_unknown_one_does_not(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    keys = KeyStore(store)
    gone, over = [await keys.create(KeySpec(name="x", expires_in=1000)) for _ in range(2)]
    assert (await client.get("/v1/jobs", headers=bearer(gone.key))).status_code == 200
    await keys.revoke(gone.id)
    await store.command("HSET", f"reasoner:key:{over.id}", "expires", "1")
    assert "was revoked at 20" in check_problem(await client.get("/v1/jobs", headers=bearer(gone.key)), 401)["detail"]
    detail = check_problem(await client.get("/v1/jobs", headers=bearer(over.key)), 401)["detail"]
    assert "expired at 1970-01-01 00:00:01 UTC" in detail
    assert "reasoner keys create" in detail
    for key in (gone, over):
        guess = key.key[:-1] + ("0" if key.key[-1] != "0" else "1")
        problem = check_problem(await client.get("/v1/jobs", headers=bearer(guess)), 401)
        assert key.id not in problem["detail"]


@pytest.mark.parametrize(
    "text",
    ["", "rk_", "rk_0_0", "rk_" + "0" * 16 + "_" + "0" * 64, "x" * 5000, "rk_*_*", "é", "rk_" + "0" * 16 + "_:log"],
)
async def test_malformed_keys_are_refused(client: httpx.AsyncClient, store: JobStore, text: str) -> None:
    good = await header(store, "ann")
    problem = check_problem(await client.get("/v1/jobs", headers={"Authorization": f"Bearer {text}".encode()}), 401)
    assert "Authorization: Bearer KEY" in problem["detail"]
    for scheme in ("Basic", ""):
        key = good["Authorization"].partition(" ")[2]
        check_problem(await client.get("/v1/jobs", headers={"Authorization": f"{scheme} {key}".strip()}), 401)
    lower = good["Authorization"].replace("Bearer", "bearer")
    assert (await client.get("/v1/jobs", headers={"Authorization": lower})).status_code == 200


@pytest.mark.parametrize(
    ("body", "field", "hint"),
    [
        ({}, "name", "required"),
        ({"name": ""}, "name", "at least 1"),
        ({"name": "x", "owner": "a:b"}, "owner", "pattern"),
        ({"name": "x", "owner": "a\n"}, "owner", "pattern"),
        ({"name": "x", "scopes": []}, "scopes", "at least 1"),
        ({"name": "x", "scopes": ["jobs"]}, "scopes.0", "'jobs:read', 'jobs:write'"),
        ({"name": "x", "expires_in": 0}, "expires_in", "greater than 0"),
        ({"name": "x", "expires": 5}, "expires", "known fields: name, owner, scopes, models, expires_in"),
    ],
)
async def test_an_invalid_field_of_a_key_is_named(client: httpx.AsyncClient, body: Any, field: str, hint: str) -> None:
    problem = check_problem(await client.post("/v1/keys", json=body), 422)
    found = {error["field"]: error["message"] for error in problem["errors"]}
    assert hint in found[field]
    assert (await client.get("/v1/keys")).json()["data"] == []


@pytest.mark.parametrize("key_id", ["key_" + "0" * 16, "x", "key_0:log"])
async def test_an_unknown_key_is_not_found(client: httpx.AsyncClient, key_id: str) -> None:
    check_problem(await client.get(f"/v1/keys/{key_id}"), 404)
    check_problem(await client.delete(f"/v1/keys/{key_id}"), 404)
    check_problem(await client.get("/v1/keys", params={"after": key_id}), 400)


async def test_a_service_beyond_loopback_requires_keys(settings: Settings, store: JobStore) -> None:
    reachable = load_settings(redis_url=settings.redis_url, host="0.0.0.0")
    async with serving(reachable, ScriptedEngine()) as client:
        check_problem(await client.get("/v1/jobs"), 401)  # though there are no keys
        assert (await client.get("/v1/jobs", headers=await header(store, "ann"))).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("localhost.evil.example", 403),
        ("[::1].evil.example", 403),
        ("", 403),
    ],
)
async def test_dns_rebinding_is_refused(client: httpx.AsyncClient, store: JobStore, host: str, status: int) -> None:
    response = await client.get("/v1/jobs", headers={"Host": host})
    assert response.status_code == status
    if status != 200:
        assert "127.0.0.1" in check_problem(response, 403)["detail"]
    keyed = await header(store, "ann")
    assert (await client.get("/v1/jobs", headers=keyed | {"Host": host})).status_code == 200


async def test_without_the_store_all_requests_are_refused(settings: Settings) -> None:
    away = settings.model_copy(update={"redis_url": "unix:///nowhere.sock"})
    async with serving(away, ScriptedEngine()) as client:
        for headers in ({}, bearer("rk_" + "0" * 16 + "_" + "0" * 64)):
            response = await client.get("/v1/strategies", headers=headers)
            check_problem(response, 503)
            assert response.headers["retry-after"] == "1"


async def test_revoking_a_key_ends_only_its_own_open_requests(
    client: httpx.AsyncClient, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "RECHECK_SECONDS", 0.05)
    keys = KeyStore(store)
    lost, kept = [await keys.create(KeySpec(name="x", owner="ann")) for _ in range(2)]
    job_id = await submitted_by(client, bearer(kept.key))
    before = HTTP_STREAMS._value.get()
    events = f"/v1/jobs/{job_id}/events"
    streams = [asyncio.create_task(client.get(events, headers=bearer(key.key))) for key in (lost, kept)]
    waiting = asyncio.create_task(client.get(f"/v1/jobs/{job_id}?wait=60", headers=bearer(lost.key)))
    asked = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "stream": True}
    chat = asyncio.create_task(client.post("/v1/chat/completions", json=asked, headers=bearer(lost.key)))
    async with asyncio.timeout(30):
        while HTTP_STREAMS._value.get() < before + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await keys.revoke(lost.id)
        cut, refused, told = await asyncio.gather(streams[0], waiting, chat)
        assert (cut.status_code, "job.cancelled" in cut.text) == (200, False)
        assert "was revoked at" in check_problem(refused, 401)["detail"]
        assert told.status_code == 200
        assert "[DONE]" not in told.text
        assert not streams[1].done()
        jobs = (await client.get("/v1/jobs", headers=bearer(kept.key))).json()["data"]
        assert [job["status"] for job in jobs] == [
            "cancelled",
            "queued",
        ]  # the chat's, and this test's
        await client.post(f"/v1/jobs/{job_id}/cancel", headers=bearer(kept.key))
        assert "job.cancelled" in (await streams[1]).text
