"""Strategies, models, metrics, request ids and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

from api.http.metrics import HTTP_STREAMS
from api.http.middleware import RequestLogMiddleware
from tests.api.conftest import submitted


async def test_strategies_are_listed_with_the_schemas_of_their_parameters(client: httpx.AsyncClient) -> None:
    strategies = {entry["name"]: entry for entry in (await client.get("/v1/strategies")).json()["data"]}
    assert strategies["beam"]["parameters"]["properties"]["n"]["type"] == "integer"


async def test_models_are_those_of_the_engine(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    policy, prm, *names = listed["data"]
    assert [(model["id"], model["kind"]) for model in (policy, prm)] == [("policy", "generate"), ("prm", "classify")]
    assert listed["default"] == "policy"
    assert (policy["defaults"]["verifier"]["model"], policy["defaults"]["sampling"]["temperature"]) == ("prm", 1.0)
    assert prm["defaults"] is None
    assert [name["id"] for name in names] == ["policy:low", "policy:medium", "policy:high"]
    assert {name["defaults"]["budget"]["tokens"] for name in names} == {5_000, 20_000, 80_000}


async def test_metrics_agree_with_the_jobs(client: httpx.AsyncClient, work: Callable[[str], Awaitable[None]]) -> None:
    job_id = await submitted(client, seed=1)
    await work(job_id)
    await submitted(client)
    usage = (await client.get(f"/v1/jobs/{job_id}")).json()["usage"]
    response = await client.get("/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["reasoner_jobs", "queued"] == 1
    assert sum(value for name, value in samples.items() if name[0] == "reasoner_jobs_finished_total") == 1
    assert samples["reasoner_tokens_total", "generated"] == usage["generated"] > 0
    assert samples["reasoner_job_seconds_count",] == samples["reasoner_job_seconds_bucket", "+Inf"] == 1
    assert samples["reasoner_queue_wait_seconds_count",] == samples["reasoner_queue_wait_seconds_bucket", "+Inf"] == 1
    assert samples["reasoner_queue_wait_seconds_sum",] <= samples["reasoner_job_seconds_sum",] < 60
    assert sum(value for name, value in samples.items() if name[0] == "reasoner_results_total") == 1
    assert samples["reasoner_dead_jobs",] == samples["reasoner_open_streams",] == 0
    assert samples["reasoner_lease_reclaims_total",] == 0
    assert samples["reasoner_queue_jobs", "interactive", "ready"] == 1
    assert samples["reasoner_queue_jobs", "batch", "ready"] == samples["reasoner_queue_jobs", "batch", "running"] == 0
    assert samples["reasoner_queue_cap",] == 5
    assert samples["reasoner_broker_memory_bytes",] > samples["reasoner_broker_memory_limit_bytes",] == 0
    assert samples["reasoner_http_requests_total", "GET", "/v1/jobs/{job_id}", "200"] >= 1


async def test_a_well_formed_request_id_is_kept_and_any_other_replaced(client: httpx.AsyncClient) -> None:
    kept = await client.get("/healthz", headers={"X-Request-ID": "abc-1"})
    replaced = await client.get("/healthz", headers={"X-Request-ID": "no spaces, please"})
    assert kept.headers["x-request-id"] == "abc-1"
    assert replaced.headers["x-request-id"] != "no spaces, please"


async def test_the_openapi_document_has_every_route_and_its_errors(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/v1/jobs", "/v1/jobs/{job_id}/events", "/v1/strategies", "/readyz"} <= set(paths)
    assert "default" in paths["/v1/jobs"]["post"]["responses"]
    assert (await client.get("/docs")).status_code == 200


async def test_an_open_stream_is_counted_while_it_is_read() -> None:
    opened: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kind = dict(scope["headers"])[b"accept"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        opened.append(HTTP_STREAMS._value.get())
        await send({"type": "http.response.body", "body": b""})

    before = HTTP_STREAMS._value.get()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(RequestLogMiddleware(app)), base_url="http://reasoner"
    ) as client:
        for kind in ("text/event-stream; charset=utf-8", "application/json"):
            await client.get("/v1/jobs/x/events", headers={"Accept": kind})
    assert opened == [before + 1, before]
    assert HTTP_STREAMS._value.get() == before
