"""The endpoint on the wire: keys, limits and malformed requests have errors in the protocol's own shape."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx
import pytest
from mcp.shared.exceptions import MCPError
from mcp.types import INTERNAL_ERROR

from tests.api.conftest import serving
from tests.api.keyed import header
from tests.api.mcp.clients import MODES, connect
from tests.api.openai_client import address, http, listening, worker
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings
from workers.store.jobs import JobStore

__all__ = ["address", "http", "worker"]

VERSION = "2026-07-28"
HEADERS = {
    "accept": "application/json, text/event-stream",
    "content-type": "application/json",
    "mcp-protocol-version": VERSION,
}


def build_request(method: str, version: str = VERSION, **params: Any) -> dict[str, Any]:
    meta = {
        "io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": {"_meta": meta, **params}}


async def post(http: httpx.AsyncClient, request: dict[str, Any], **headers: str) -> httpx.Response:
    more = {"mcp-method": request["method"], **headers}
    return await http.post("/mcp", json=request, headers=HEADERS | more)


async def test_a_request_needs_no_session_and_is_answered_in_json(client: httpx.AsyncClient) -> None:
    response = await post(client, build_request("tools/list"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert "mcp-session-id" not in response.headers
    answer = response.json()
    assert (answer["jsonrpc"], answer["id"], answer["result"]["resultType"]) == ("2.0", 7, "complete")
    assert answer["result"]["ttlMs"] > 0
    assert answer["result"]["cacheScope"] == "public"


async def test_a_revision_that_is_not_served_is_refused_with_those_that_are(client: httpx.AsyncClient) -> None:
    request = build_request("tools/list", "2030-01-01")
    response = await post(client, request, **{"mcp-protocol-version": "2030-01-01"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == -32022
    assert error["data"] == {"supported": [VERSION], "requested": "2030-01-01"}


async def test_an_old_client_that_knows_no_revision_is_answered_too(client: httpx.AsyncClient) -> None:
    """The revision of 2024 had neither the header nor the envelope."""
    params = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    headers = {name: value for name, value in HEADERS.items() if name != "mcp-protocol-version"}
    response = await client.post("/mcp", json=request, headers=headers)
    assert response.status_code == 200
    answer = json.loads(next(line for line in response.text.splitlines() if line.startswith("data: {"))[6:])
    assert answer["result"]["protocolVersion"] == "2024-11-05"
    assert "mcp-session-id" not in response.headers


async def test_there_are_no_sessions_to_open_or_end(client: httpx.AsyncClient) -> None:
    for method in ("GET", "DELETE", "PUT"):
        response = await client.request(method, "/mcp", headers=HEADERS)
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert response.json()["error"]["code"] == -32600


async def test_a_malformed_body_is_a_protocol_error(client: httpx.AsyncClient) -> None:
    for body, code in (
        (b"{", -32700),
        (b'{"a": NaN}', -32700),
        (b'{"jsonrpc": "2.0", "id": 1, "id": 2}', -32700),
        (b"[" * 200 + b"]" * 200, -32700),
        (b"[]", -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}', -32602),
    ):
        response = await client.post("/mcp", content=body, headers=HEADERS)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == code, body
        assert response.json()["jsonrpc"] == "2.0"


async def test_a_large_body_is_refused_before_it_is_read(client: httpx.AsyncClient) -> None:
    async def stream() -> Any:
        for _ in range(30):
            yield b" " * 1000

    for content in (b" " * 30_000, stream()):
        response = await client.post("/mcp", content=content, headers=HEADERS)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == -32600


async def test_pages_of_other_origins_may_not_call(settings: Settings) -> None:
    allowing = settings.model_copy(update={"cors_origins": ("https://page.test",)})
    async with serving(allowing, ScriptedEngine()) as client:
        for origin, status in (
            ("http://127.0.0.1", 200),
            ("https://page.test", 200),
            ("http://other.test", 403),
            ("null", 403),
        ):
            response = await post(client, build_request("tools/list"), origin=origin)
            assert response.status_code == status, origin
            assert ("error" in response.json()) == (status == 403)


async def test_without_a_key_nothing_is_answered(http: httpx.AsyncClient, store: JobStore) -> None:
    await header(store, "someone")
    response = await post(http, build_request("tools/list"), authorization="Bearer wrong")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == -32600


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_sees_why_its_key_is_refused(address: str, store: JobStore, mode: str) -> None:
    await header(store, "someone")
    refusal = pytest.RaisesExc(MCPError, match="this API key is unknown: send one of this service's keys")
    with pytest.RaisesGroup(refusal, flatten_subgroups=True):
        async with connect(address, {"Authorization": "Bearer wrong"}, mode=mode):
            pass


async def test_jobs_are_those_of_the_owner_of_the_key_and_tools_need_its_scopes(
    address: str, store: JobStore, worker: None
) -> None:
    mine, yours = await header(store, "me"), await header(store, "you")
    reading = await header(store, "me", "jobs:read")
    async with connect(address, mine) as client:
        solved: Any = (await client.call_tool("solve", {"problem": "1 + 1?"})).structured_content
    async with connect(address, yours) as client:
        for tool in ("job", "cancel"):
            refused = await client.call_tool(tool, {"job_id": solved["job_id"]})
            assert refused.is_error
            assert "there is no job" in str(refused.content)
    async with connect(address, reading) as client:
        shown: Any = (await client.call_tool("job", {"job_id": solved["job_id"]})).structured_content
        assert shown["answer"] == solved["answer"]
        refused = await client.call_tool("solve", {"problem": "1 + 1?"})
        assert refused.is_error
        assert "needs jobs:write" in str(refused.content)


async def test_limits_are_those_of_http(settings: Settings, store: JobStore) -> None:
    more = {"tokens": 50, "requests_per_second": 0.001, "burst": 4}
    limited = settings.model_copy(update={"limits": settings.limits.model_copy(update=more)})
    async with listening(limited) as address, connect(address) as client:  # which asks for the revisions first
        await client.list_tools()
        refused = await client.call_tool("solve", {"problem": "1 + 1?", "budget": {"tokens": 51}})
        assert "budget.tokens: 51 is more than your limit of 50" in str(refused.content)
        await client.call_tool("job", {"job_id": "job_1"})
        with pytest.raises(MCPError, match="this key may send"):
            await client.call_tool("job", {"job_id": "job_1"})


async def test_a_service_without_the_package_says_how_to_install_it(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.streamable_http_manager", None)
    for _ in range(2):
        response = await post(client, build_request("tools/list"))
        assert response.status_code == 501
        assert response.json()["error"]["message"].endswith("pip install 'reasoner[mcp]'")


async def test_a_start_that_failed_is_tried_again(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("api.mcp.endpoint._build_manager", lambda _: 1 / 0)
        for _ in range(2):
            assert (await post(client, build_request("tools/list"))).status_code == 500
    assert (await post(client, build_request("tools/list"))).status_code == 200


@pytest.mark.parametrize("mode", MODES)
async def test_an_internal_error_does_not_tell_what_it_was(
    address: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("api.mcp.jobs.StoredJobs.submit", fail)
    async with connect(address, mode=mode) as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("solve", {"problem": "1 + 1?"})
    assert (caught.value.error.code, caught.value.error.message) == (INTERNAL_ERROR, "Internal server error")


def test_a_service_that_nobody_calls_so_does_not_import_the_package() -> None:
    code = "import sys, api.app.app; sys.exit(any(name.partition('.')[0] == 'mcp' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
