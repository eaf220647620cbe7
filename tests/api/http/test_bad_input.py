"""Every invalid request gets a problem document that states valid values, and the service keeps running."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.protocol.types import EngineUnavailable, ModelInfo
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.messages import MAX_PROBLEM_CHARS
from tests.api.conftest import serving, submitted
from tests.scripted import ScriptedEngine
from workers.broker.embedded import EmbeddedBroker
from workers.config.settings import Settings, load_settings

SECRET = "a-key-of-many-characters"


def check_problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """Check that the response is a problem document (RFC 9457), and return it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert problem["type"].startswith("urn:reasoner:problem:")
    assert problem["title"]
    assert problem["detail"]
    assert problem["request_id"] == response.headers["x-request-id"]
    return problem


@pytest.mark.parametrize(
    ("body", "field", "hint"),
    [
        ({}, "body", "there is no question: give 'problem', a text, or 'messages', a conversation"),
        (
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "The"}]},
            "messages",
            "end with",
        ),
        ({"problem": "?", "n": "8"}, "n", '{"strategy": {"name": "self_consistency", "n": …}}; known fields: problem'),
        ({"problem": "?", "expansions": 2}, "expansions", '{"strategy": {"name": "beam", "expansions": …}}'),
        ({"problem": "?", "seconds": 2}, "seconds", '{"budget": {"seconds": …}}; known fields'),
        ({"problem": "?", "temperature": 2}, "temperature", '{"sampling": {"temperature": …}}; known fields'),
        ({"problem": "", "seed": 1}, "problem", "at least 1 character"),
        ({"problem": " \n"}, "problem", "write the question"),
        ({"problem": 5}, "problem", "string"),
        ({"problem": "?", "messages": [{"role": "user", "content": "?"}]}, "body", "either"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "?"}]}, "messages.0.role", "'assistant' or 'tool'"),
        ({"messages": [{"role": "user", "content": "?", "name": "x"}]}, "messages.0.name", "role, content"),
        ({"problem": "?", "strategy": {"name": "magic"}}, "strategy", "known are greedy"),
        ({"problem": "?", "strategy": {"name": "best_of_n", "m": 3}}, "strategy", "its parameters: n"),
        ({"problem": "?", "strategy": {"name": "best_of_n", "n": MAX_N + 1}}, "strategy", str(MAX_N)),
        ({"problem": "?", "strategy": {"name": "best_of_n", "n": 0}}, "strategy", "greater than or equal to 1"),
        ({"problem": "?", "strategy": {}}, "strategy.name", "required"),
        ({"problem": "?", "tokens": 5}, "tokens", "known fields: problem, messages, model"),
        ({"problem": "?", "budget": {"token": 5}}, "budget.token", "known fields: tokens, thinking_tokens, seconds"),
        ({"problem": "?", "budget": {"tokens": 0}}, "budget.tokens", "greater than or equal to 1"),
        ({"problem": "?", "budget": {"seconds": 0}}, "budget.seconds", "greater than 0"),
        ({"problem": "?", "budget": {"seconds": "soon"}}, "budget.seconds", "number"),
        ({"problem": "?", "budget": {"tokens": True}}, "budget.tokens", "not true or false"),
        ({"problem": "?", "seed": False}, "seed", "not true or false"),
        ({"problem": "?", "strategy": {"name": "beam", "n": True}}, "strategy", "not true or false"),
        ({"problem": "?", "sampling": {"temperature": -1}}, "sampling.temperature", "greater than or equal to 0"),
        ({"problem": "?", "seed": -1}, "seed", "greater than or equal to 0"),
        ({"problem": "?", "seed": 2**63}, "seed", "less than"),
        ({"problem": "?", "budget": {"flops": 0}}, "budget.flops", "greater than 0"),
        ({"problem": "?", "budget": {"flops": 3999}}, "budget.flops", "give at least 4000"),
        ({"problem": "?", "budget": {"cost": 1}}, "budget.cost", "write [models.policy.prices]"),
        ({"problem": "?", "budget": {"effort": "epic"}}, "budget.effort", "known are minimal, low, medium, high"),
        ({"problem": "?", "budget": {"effort": "low", "tokens": 7}}, "budget.tokens", "sets the limits (tokens 5000)"),
        ({"problem": "?", "strategy": "beam"}, "strategy", 'a JSON object such as {"name": …}'),
        ({"problem": "?", "verifier": "judge"}, "verifier", 'a JSON object such as {"kind": …}'),
        ({"problem": "?", "budget": 500}, "budget", 'a JSON object such as {"tokens": …}'),
        ({"messages": ["?"]}, "messages.0", 'a JSON object such as {"role": …}'),
        ({"problem": "?", "priority": "now"}, "priority", "'interactive' or 'batch'"),
        ({"problem": "?", "model": "gpt"}, "model", "served are policy"),
        ({"problem": "?", "verifier": {"model": "policy"}}, "verifier.model", "served are prm"),
        ({"problem": "?", "verifier": {"kind": "judge", "model": "prm"}}, "verifier.model", "served are policy"),
        ({"problem": "?", "verifier": {"kind": "oracle"}}, "verifier", "use one of prm, judge, outcome"),
        (
            {"problem": "?", "verifier": {"kind": "judge", "prompt": "?"}},
            "verifier.prompt",
            "known fields: kind",
        ),
        ({"problem": "?", "verifier": {"kind": "math"}}, "verifier.expected", "required"),
        ({"problem": "?", "verifier": {"kind": "regex", "pattern": "("}}, "verifier.pattern", "not a regular"),
        ({"problem": "?", "verifier": {"kind": "python", "tests": ["assert ("]}}, "verifier.tests.0", "not Python"),
        (
            {"problem": "?", "verifier": {"kind": "json_schema", "json_schema": {"type": 5}}},
            "verifier.json_schema",
            "not a JSON schema",
        ),
        ({"problem": "?", "verifier": {"kind": "exact", "expect": "4"}}, "verifier.expect", "known fields: kind, exp"),
        ({"problem": "?", "answer": "maths"}, "answer.compare", "'math', 'text', 'choice', 'code' or 'json'"),
        ({"problem": "?", "answer": {"extract": {"regex": "("}}}, "answer.extract.regex", "not a regular expression"),
        ({"problem": "?", "answer": {"extract": "box"}}, "answer.extract", "'boxed'"),
        ({"problem": "?", "verifier": {"aggregation": "median"}}, "verifier.aggregation", "'last', 'min', 'prod'"),
        ({"problem": "?", "metadata": {"a": "x" * 513}}, "metadata.a", "at most 512"),
        (["problem"], "body", "send a JSON object"),
        (None, "body", "send a JSON object"),
    ],
)
async def test_an_invalid_field_is_named_with_valid_values(
    client: httpx.AsyncClient, body: Any, field: str, hint: str
) -> None:
    problem = check_problem(await client.post("/v1/jobs", json=body), 422)
    found = {error["field"]: error["message"] for error in problem["errors"]}
    assert field in found, problem
    assert hint in found[field], problem
    await submitted(client)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b'{"problem": ', "EOF while parsing a value at line 1 column 12"),
        (b"{problem: 1}", "key must be a string at line 1 column 2"),
        (b'{"problem": "\x00"}', "control character"),
        (b"\xff\xfe", "expected value at line 1 column 1"),
        (b'{"problem": "\xff"}', "invalid unicode code point at line 1 column 14"),
        ('{"problem": "?"}'.encode("utf-16-be"), "expected value at line 1 column 1"),
        (b"[" * 15_000, "recursion limit"),
        (b'{"problem": "?", "metadata": ' + b'{"a":' * 101 + b"1" + b"}" * 102, "more than 100 deep"),
        (b'{"problem": "?", "budget": {"seconds": NaN}}', "expected value at line 1 column 40"),
        (b'{"problem": "?", "budget": {"seconds": -Infinity}}', "invalid number at line 1 column 41"),
        (b'{"problem": "?", "budget": {"seconds": 1e999}}', "larger than a 64-bit float"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "number out of range"),
        (b'{"problem": "?", "budget": {"tokens": 50}, "budget": {"tokens": 60}}', 'duplicate key "budget"'),
        (b'{"problem": "\\ud83d\\ud83d"}', "lone leading surrogate"),
        (b'{"problem": "?", "metadata": {"\\udc00": "low"}}', "lone leading surrogate"),
        (b'{"problem": "?", "verifier": {"kind": "regex", "pattern": "\\ud800"}}', "unexpected end of hex escape"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/batches", "/v1/chat/completions", "/v1/responses", "/v1/keys"])
async def test_malformed_json_is_refused_with_the_reason(
    client: httpx.AsyncClient, path: str, body: bytes, hint: str
) -> None:
    response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert hint in (response.json().get("detail") or response.json()["error"]["message"])


async def test_an_empty_body_is_refused_with_the_expected_body(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/jobs", content=b"", headers={"Content-Type": "application/json"})
    assert "send a JSON object" in check_problem(response, 422)["detail"]


async def test_text_of_any_alphabet_is_returned_unchanged(client: httpx.AsyncClient) -> None:
    text = "\u0661+\u0662? \U0001f600 \u2028\u202e\u0000\ufeff"
    job_id = await submitted(client, problem=text, metadata={text: text})
    for path in (f"/v1/jobs/{job_id}", "/v1/jobs?limit=1"):
        found = (await client.get(path)).json()
        spec = found.get("spec") or found["data"][0]["spec"]
        assert (spec["problem"], spec["metadata"]) == (text, {text: text})


async def test_json_under_another_content_type_is_refused_with_the_expected_type(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/jobs", content=b'{"problem": "?"}', headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in check_problem(response, 422)["errors"][0]["message"]


async def test_an_oversized_problem_is_refused(settings: Settings) -> None:
    roomy = settings.model_copy(update={"body_cap": 2 * MAX_PROBLEM_CHARS})
    async with serving(roomy, ScriptedEngine()) as client:
        response = await client.post("/v1/jobs", json={"problem": "x" * (MAX_PROBLEM_CHARS + 1)})
        assert str(MAX_PROBLEM_CHARS) in check_problem(response, 422)["errors"][0]["message"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_oversized_body_is_refused_with_or_without_its_content_length(
    client: httpx.AsyncClient, settings: Settings, chunked: bool
) -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b"x" * (settings.body_cap // 5)

    content = chunks() if chunked else b"x" * (settings.body_cap + 1)
    response = await client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert str(settings.body_cap) in check_problem(response, 413)["detail"]


@pytest.mark.parametrize("job_id", ["job_" + "0" * 32, "x", "job_x:log", "%00", "é", "job_" + "0" * 32 + ":log"])
@pytest.mark.parametrize(
    ("method", "suffix"),
    [("GET", ""), ("GET", "/events"), ("GET", "/tree"), ("POST", "/cancel"), ("POST", "/retry"), ("DELETE", "")],
)
async def test_an_unknown_job_is_not_found(client: httpx.AsyncClient, job_id: str, method: str, suffix: str) -> None:
    check_problem(await client.request(method, f"/v1/jobs/{job_id}{suffix}"), 404)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/jobs?limit=0", "limit"),
        ("/v1/jobs?limit=1000", "limit"),
        ("/v1/jobs?limit=x", "limit"),
        ("/v1/jobs?status=done", "status"),
        ("/v1/jobs?limit=5&limit=6", "limit"),
        ("/v1/jobs?state=failed", "state"),
        ("/v1/jobs/export?since=1e400", "since"),
        ("/v1/jobs/export?since=nan", "since"),
        ("/v1/jobs/export?until=-1", "until"),
        ("/v1/jobs/export?before=5", "before"),
        ("/v1/keys?owner=me", "owner"),
    ],
)
async def test_an_invalid_query_parameter_is_named(client: httpx.AsyncClient, path: str, field: str) -> None:
    assert check_problem(await client.get(path), 422)["errors"][0]["field"] == field


async def test_an_unknown_query_parameter_is_refused_with_the_known_ones(client: httpx.AsyncClient) -> None:
    job_id = await submitted(client)
    problem = check_problem(await client.get(f"/v1/jobs/{job_id}?waits=5&wait=1"), 422)
    assert problem["errors"] == [{"field": "waits", "message": "unknown parameter; known parameters: wait"}]
    assert "this call has none" in check_problem(await client.post(f"/v1/jobs/{job_id}/cancel?now=1"), 422)["detail"]


@pytest.mark.parametrize("last", ["9" * 6000, "9" * 18, "-1", "1.5", "x"])
async def test_a_stream_cannot_start_after_an_invalid_event_id(client: httpx.AsyncClient, last: str) -> None:
    job_id = await submitted(client)
    response = await client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": last})
    assert len(check_problem(response, 400)["detail"]) < 200


async def test_an_unknown_cursor_is_named(client: httpx.AsyncClient) -> None:
    assert check_problem(await client.get("/v1/jobs?after=job_x"), 400)["errors"][0]["field"] == "after"


async def test_waiting_longer_than_allowed_is_refused(client: httpx.AsyncClient) -> None:
    job_id = await submitted(client)
    assert "60" in check_problem(await client.get(f"/v1/jobs/{job_id}?wait=61"), 422)["errors"][0]["message"]


async def test_unknown_paths_and_methods_get_problem_documents(client: httpx.AsyncClient) -> None:
    assert "/docs" in check_problem(await client.get("/v2/jobs"), 404)["detail"]
    assert "leave out the last slash" in check_problem(await client.get("/v1/jobs/"), 404)["detail"]
    response = await client.put("/v1/jobs")
    assert "it takes GET, POST" in check_problem(response, 405)["detail"]
    assert response.headers["allow"] == "GET, POST"


async def test_health_checks_and_pages_answer_head_requests(client: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/readyz", "/docs", "/"):
        assert (await client.head(path)).status_code == 200, path


async def test_a_full_queue_is_refused_with_retry_after(client: httpx.AsyncClient, settings: Settings) -> None:
    for _ in range(settings.queue_cap):
        await submitted(client)
    response = await client.post("/v1/jobs", json={"problem": "?"})
    check_problem(response, 503)
    assert int(response.headers["retry-after"]) > 0


async def test_a_missing_broker_is_a_503_at_once_and_requests_succeed_when_it_returns(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path)
    async with serving(settings, ScriptedEngine()) as client, asyncio.timeout(30):
        for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/metrics")):
            response = await client.request(method, path, json={"problem": "?"} if method == "POST" else None)
            check_problem(response, 503)
            assert response.headers["retry-after"] == "1"
        ready = check_problem(await client.get("/readyz"), 503)
        assert [error["field"] for error in ready["errors"]] == ["broker"]
        assert (await client.get("/healthz")).status_code == 200
        with EmbeddedBroker(tmp_path):
            await submitted(client)
            assert (await client.get("/readyz")).status_code == 200
        check_problem(await client.get("/v1/jobs"), 503)
        with EmbeddedBroker(tmp_path):  # the jobs are in the append-only file
            assert len((await client.get("/v1/jobs")).json()["data"]) == 1


async def test_a_broker_that_hangs_does_not_hang_the_api(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path)
    with EmbeddedBroker(tmp_path) as broker:
        assert broker.process is not None
        async with serving(settings, ScriptedEngine()) as client:
            await submitted(client)
            broker.process.send_signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(5):
                    check_problem(await client.get("/v1/jobs"), 503)
            finally:
                broker.process.send_signal(signal.SIGCONT)
            await submitted(client)


class AbsentEngine(ScriptedEngine):
    async def models(self) -> list[ModelInfo]:
        raise EngineUnavailable("the engine at http://nowhere could not be reached")


async def test_without_an_engine_jobs_are_accepted_and_readiness_reports_it(settings: Settings) -> None:
    async with serving(settings, AbsentEngine()) as client:
        assert (await client.get("/healthz")).status_code == 200
        ready = check_problem(await client.get("/readyz"), 503)
        assert ready["errors"] == [{"field": "engine", "message": "the engine at http://nowhere could not be reached"}]
        models = await client.get("/v1/models")  # whose errors are for OpenAI's clients
        assert (models.status_code, models.json()["error"]["code"]) == (503, "engine_unavailable")
        job_id = await submitted(client, model="whatever")
        assert (await client.get(f"/v1/jobs/{job_id}")).json()["status"] == "queued"


async def test_configured_keys_are_required(settings: Settings) -> None:
    locked = load_settings(redis_url=settings.redis_url, api_keys=f"another-long-key-0,{SECRET}")
    async with serving(locked, ScriptedEngine()) as client:
        for path in ("/v1/jobs", "/v1/strategies", "/metrics", "/nowhere"):
            response = await client.get(path)
            check_problem(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        for header in ("", "Bearer", "Bearer wrong", f"Basic {SECRET}", f"Bearer {SECRET}x", "Bearer é"):
            check_problem(await client.get("/v1/jobs", headers={"Authorization": header.encode()}), 401)
        assert (await client.get("/v1/jobs", headers={"Authorization": f"bearer {SECRET}"})).status_code == 200
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


async def test_an_unexpected_error_is_a_problem_document_without_details(settings: Settings) -> None:
    class Broken(ScriptedEngine):
        async def models(self) -> list[ModelInfo]:
            raise ZeroDivisionError("secret")

    async with serving(settings, Broken()) as client:
        assert "secret" not in str(check_problem(await client.post("/v1/jobs", json={"problem": "?"}), 500))
        assert (await client.get("/v1/strategies")).is_success
