"""While its broker refuses, no route of the API fails in another way than with 503 and ``Retry-After``."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import redis

from api.app.app import create_app
from tests.api.conftest import serving
from tests.scripted import ScriptedEngine
from tests.workers.broker.test_refusals import PASSWORD, STATES
from workers.broker.embedded import EmbeddedBroker
from workers.config.settings import load_settings

KEY = "a-key-of-many-characters"
JOB = {"problem": "1 + 1?"}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
BODIES: dict[tuple[str, str], Any] = {
    ("post", "/v1/jobs"): JOB,
    ("post", "/v1/batches"): {"jobs": [JOB], "budget": {"tokens": 1000}},
    ("post", "/v1/select"): {**JOB, "candidates": ["1", "2"]},
    ("post", "/v1/keys"): {"name": "mine"},
    ("post", "/v1/chat/completions"): CHAT,
    ("post", "/v1/responses"): {"model": "policy", "input": "?"},
    ("post", "/v1/messages"): CHAT | {"max_tokens": 100},
}
NEED_NO_BROKER = {"/healthz", "/v1/strategies", "/v1/models", "/v1/models/{model}"}
WRITES = {"/v1/jobs", "/v1/batches", "/v1/select", "/v1/keys", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
UNAVAILABLE = (503, 529)
"""Statuses of a service that is away; the second is of Anthropic's routes."""


@functools.cache
def openapi_paths() -> dict[str, Any]:
    """Return the paths of the OpenAPI document, which takes a second to build."""
    paths: dict[str, Any] = create_app(load_settings()).openapi()["paths"]
    return paths


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("stored_key", [False, True], ids=["configured key", "stored key"])
async def test_every_route_answers_or_says_503(tmp_path: Path, state: str, stored_key: bool) -> None:
    with EmbeddedBroker(tmp_path) as broker, redis.Redis.from_url(broker.url) as operator:
        settings = load_settings(redis_url=broker.url, data_dir=tmp_path, api_keys=KEY)
        async with serving(settings, ScriptedEngine()) as client:
            client.headers["Authorization"] = f"Bearer {KEY}"
            made = await client.post("/v1/keys", json={"name": "k", "scopes": ["admin", "jobs:read", "jobs:write"]})
            job = (await client.post("/v1/jobs", json=JOB)).json()["id"]
            batch = (await client.post("/v1/batches", json=BODIES["post", "/v1/batches"])).json()["id"]
            await client.post(f"/v1/jobs/{job}/cancel")  # the stream of a job that goes on has no end
            assert (await client.get("/readyz")).status_code == 200
            if stored_key:
                client.headers["Authorization"] = f"Bearer {made.json()['key']}"
            ids = {"job_id": job, "batch_id": batch, "key_id": "key_0", "response_id": job, "model": "policy"}
            ids |= {"file_id": "file-" + "0" * 32, "message_batch_id": "msgbatch_" + "0" * 32}
            STATES[state][0](operator)
            operator.execute_command("CLIENT", "KILL", "TYPE", "normal")  # a login is asked of new connections alone

            async with asyncio.timeout(30):  # until the loop has seen that its connections are lost
                while STATES[state][1] not in (ready := await client.get("/readyz")).text:
                    assert ready.status_code == 503
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
            assert [part["field"] for part in ready.json()["errors"]] == ["broker"]
            for path, item in openapi_paths().items():
                for method in item:
                    response = await client.request(method, path.format(**ids), json=BODIES.get((method, path)))
                    call = f"{method} {path}: {response.status_code} {response.text[:200]}"
                    assert response.status_code < 500 or response.status_code in UNAVAILABLE, call
                    assert PASSWORD not in response.text
                    if response.status_code in UNAVAILABLE:
                        assert response.headers["retry-after"] == "1", call
                    if path in NEED_NO_BROKER and not (stored_key and path != "/healthz"):
                        assert response.status_code == 200, call
                    if method == "post" and path in WRITES:
                        assert response.status_code in UNAVAILABLE, call
                        assert STATES[state][1] in response.text
