"""Every route of the OpenAPI document, called with keys that lack its scopes and by owners of other things. A new route
without its checks, or with an unknown path parameter, fails here.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from api.app.app import create_app
from tests.api.conftest import serving
from tests.api.keyed import header, submitted
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings, load_settings
from workers.store.jobs import JobStore
from workers.store.keys import SCOPES, KeySpec, KeyStore

OPEN = {("GET", "/healthz"), ("GET", "/readyz")}
"""Calls that need no key."""
ANY_KEY = {("GET", "/v1/strategies"), ("GET", "/v1/verifiers"), ("GET", "/v1/models"), ("GET", "/v1/models/{model}")}
"""Calls that any key may make, with the same answer for all."""
ADMIN = "/v1/keys"
SECRET = "what-ann-asked"

OPERATIONS: dict[tuple[str, str], dict[str, Any]] = {
    (method.upper(), path): operation
    for path, item in create_app(load_settings()).openapi()["paths"].items()
    for method, operation in item.items()
}


def needed(operation: tuple[str, str]) -> set[str]:
    """Return the scopes that the document requires."""
    return {scope for way in OPERATIONS[operation].get("security", ()) for scopes in way.values() for scope in scopes}


async def owned(client: httpx.AsyncClient, ann: dict[str, str], parameter: str) -> str:
    """Create an ended job, batch or key of Ann's and return its id, for a path parameter."""
    match parameter:
        case "job_id":
            job_id = await submitted(client, ann, problem=SECRET)
            assert (await client.post(f"/v1/jobs/{job_id}/cancel", headers=ann)).status_code == 200
            return job_id
        case "response_id":
            return "resp_" + (await owned(client, ann, "job_id")).removeprefix("job_")
        case "batch_id":
            body = {"jobs": [{"problem": SECRET}], "budget": {"tokens": 9}}
            return str((await client.post("/v1/batches", json=body, headers=ann)).json()["id"])
        case "message_batch_id":
            message = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": SECRET}]}
            body = {"requests": [{"custom_id": "a", "params": message}]}
            return str((await client.post("/v1/messages/batches", json=body, headers=ann)).json()["id"])
        case "file_id":
            parts = {"purpose": (None, "batch"), "file": ("secret.jsonl", SECRET)}
            return str((await client.post("/v1/files", files=parts, headers=ann)).json()["id"])
        case "key_id":
            return "key_" + "0" * 16
    raise AssertionError(f"teach this test whose {{{parameter}}} is")


async def call(client: httpx.AsyncClient, operation: tuple[str, str], path: str, headers: Any) -> httpx.Response:
    method, _ = operation
    body = {} if "requestBody" in OPERATIONS[operation] else None
    return await client.request(method, path, json=body, headers=headers)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"queue_cap": 1000})


@pytest.mark.parametrize("operation", sorted(OPERATIONS), ids=" ".join)
async def test_without_a_key_only_open_paths_are_served(
    client: httpx.AsyncClient, store: JobStore, operation: tuple[str, str]
) -> None:
    await header(store, "ann")
    response = await call(client, operation, operation[1].replace("{", "").replace("}", ""), {})
    if operation in OPEN:
        assert response.status_code in (200, 503)
    else:
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - OPEN - ANY_KEY), ids=" ".join)
async def test_a_key_without_the_scope_that_the_document_names_is_refused(
    client: httpx.AsyncClient, store: JobStore, operation: tuple[str, str]
) -> None:
    scopes = needed(operation)
    assert scopes, "the route asks for no scope: give it one of api.http.principal's dependencies"
    assert scopes <= SCOPES
    writes = operation[0] not in ("GET", "HEAD")
    assert ("admin" if operation[1].startswith(ADMIN) else "jobs:write") in scopes or not writes
    ann = await header(store, "ann")
    template, parameter = operation[1], operation[1].partition("{")[2].partition("}")[0]
    path = template.replace(f"{{{parameter}}}", await owned(client, ann, parameter)) if parameter else template
    for scope in scopes:
        others = await header(store, "ann", *(SCOPES - {scope}))
        response = await call(client, operation, path, others)
        assert response.status_code == 403, response.text
        assert f'scope="{scope}"' in response.headers["www-authenticate"]
        assert scope in response.text


@pytest.mark.parametrize(
    "operation",
    sorted(op for op in OPERATIONS.keys() - ANY_KEY if "{" in op[1] and not op[1].startswith(ADMIN)),
    ids=" ".join,
)
async def test_jobs_and_keys_of_other_owners_are_not_found(
    client: httpx.AsyncClient, store: JobStore, operation: tuple[str, str]
) -> None:
    ann, bob, admin = [
        await header(store, owner, "jobs:read", "jobs:write", *more)  # type: ignore[arg-type]
        for owner, more in (("ann", ()), ("bob", ()), ("eve", ("admin",)))
    ]
    _, template = operation
    parameter = template.partition("{")[2].partition("}")[0]
    for allowed in (ann, admin):
        path = template.replace(f"{{{parameter}}}", await owned(client, ann, parameter))
        before = (await client.get("/v1/jobs", headers=ann)).json()
        refused = await call(client, operation, path, bob)
        assert refused.status_code == 404, refused.text
        assert SECRET not in refused.text
        unknown = await call(client, operation, path[:-40] + path[-40:].replace("a", "b").replace("0", "1"), bob)
        assert unknown.status_code == 404, "a foreign thing and none must look the same"
        assert (await client.get("/v1/jobs", headers=ann)).json() == before
        answer = await call(client, operation, path, allowed)
        assert answer.status_code not in (401, 403, 404), answer.text


@pytest.mark.parametrize("path", sorted(path for method, path in OPERATIONS if method == "GET" and "{" not in path))
async def test_lists_contain_nothing_of_other_owners(client: httpx.AsyncClient, store: JobStore, path: str) -> None:
    ann, bob = await header(store, "ann"), await header(store, "bob", *(SCOPES - {"admin"}))
    ids = [await owned(client, ann, parameter) for parameter in ("job_id", "batch_id")]
    response = await client.get(path, headers=bob)
    assert response.status_code == (403 if path.startswith(ADMIN) else 200), response.text
    assert not [word for word in (SECRET, *ids) if word in response.text]


async def test_a_conversation_of_another_owner_cannot_be_continued(client: httpx.AsyncClient, store: JobStore) -> None:
    ann, bob = await header(store, "ann"), await header(store, "bob")
    job_id = await owned(client, ann, "job_id")
    answers = []
    for before in (job_id.replace("job_", "resp_"), "resp_" + "0" * 32):
        body = {"model": "policy", "input": "?", "previous_response_id": before}
        response = await client.post("/v1/responses", json=body, headers=bob)
        assert (response.status_code, response.json()["error"]["param"]) == (404, "previous_response_id")
        answers.append(response.text.replace(before, ""))
    assert answers[0] == answers[1], "a foreign one and none must look the same"
    assert (await client.get("/v1/jobs", headers=bob)).json()["data"] == []


async def test_lists_contain_the_owners_items_and_for_an_admin_all(client: httpx.AsyncClient, store: JobStore) -> None:
    ann, bob = await header(store, "ann"), await header(store, "bob")
    also_ann, admin = await header(store, "ann"), await header(store, "eve", "jobs:read", "admin")
    mine, others = await submitted(client, ann), await submitted(client, bob)

    async def listed(headers: dict[str, str]) -> list[str]:
        return [job["id"] for job in (await client.get("/v1/jobs", headers=headers)).json()["data"]]

    assert await listed(ann) == await listed(also_ann) == [mine]
    assert await listed(bob) == [others]
    assert await listed(admin) == [others, mine]


async def test_equal_idempotency_keys_of_two_owners_are_independent(client: httpx.AsyncClient, store: JobStore) -> None:
    ann, bob = await header(store, "ann"), await header(store, "bob")
    key = {"Idempotency-Key": "k"}
    first = await client.post("/v1/jobs", json={"problem": "a"}, headers=ann | key)
    second = await client.post("/v1/jobs", json={"problem": "b"}, headers=bob | key)
    again = await client.post("/v1/jobs", json={"problem": "a"}, headers=ann | key)
    assert (first.status_code, second.status_code) == (202, 202)
    assert again.json()["id"] == first.json()["id"] != second.json()["id"]


async def test_a_configured_key_may_do_everything(settings: Settings, store: JobStore) -> None:
    ann = await header(store, "ann")
    config = {"Authorization": "Bearer configured-key-of-an-operator"}
    locked = load_settings(redis_url=settings.redis_url, api_keys="configured-key-of-an-operator")
    async with serving(locked, ScriptedEngine()) as client:
        job_id = await submitted(client, ann)
        assert (await client.get(f"/v1/jobs/{job_id}", headers=config)).status_code == 200
        made = await client.post("/v1/keys", json={"name": "x"}, headers=config)
        assert made.status_code == 201


@pytest.mark.parametrize("path", ["/v1/jobs", "/healthz", "/nowhere", "/v1/jobs/x", "/metrics"])
async def test_every_response_has_the_security_headers(client: httpx.AsyncClient, path: str) -> None:
    headers = (await client.get(path)).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert ("no-store" in headers.get("cache-control", "")) == path.startswith("/v1/")


async def test_no_response_contains_a_key_but_the_one_that_creates_it(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    admin = await header(store, "eve", "admin")
    made = (await client.post("/v1/keys", json={"name": "x"}, headers=admin)).json()
    secret = made["key"].rpartition("_")[2]
    for path in ("/v1/keys", f"/v1/keys/{made['id']}"):
        assert secret not in (await client.get(path, headers=admin)).text
    assert secret not in (await client.delete(f"/v1/keys/{made['id']}", headers=admin)).text
    stored = json.dumps(await store.command("HGETALL", f"reasoner:key:{made['id']}"))
    assert secret not in stored
    assert len(secret) * 4 == 256
    assert (await KeyStore(store).create(KeySpec(name="x"))).key != made["key"]
