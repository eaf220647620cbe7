"""Traces from a request to the engine calls of its job, and no tracing code without a collector."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engine.protocol.types import Branch, EngineUnavailable, GenerateRequest, TokenizeRequest
from engine.remote.http import HttpEngine
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.workers.collector import Collector
from workers.config.settings import load_settings
from workers.config.types import ConfigError
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore
from workers.store.request_origin import ORIGIN, Origin
from workers.telemetry import tracing
from workers.telemetry.search_spans import JOB, derive_span_id

SPEC = build_spec(
    {
        "problem": "the quick brown problem",
        "model": "policy",
        "verifier": {"kind": "prm", "model": "prm"},
        "strategy": {"name": "best_of_n", "n": 2},
        "seed": 1,
        "priority": "interactive",
    }
).model_dump()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.trace_with(provider)
    yield exporter
    tracing.trace_with(None)
    provider.shutdown()


async def run(store: JobStore, engine: ScriptedEngine) -> str:
    """Submit a job inside a request's span, and run it outside of it, as another process does."""
    with tracing.span("POST", "server", {}):
        token = ORIGIN.set(Origin("r1", tracing.traceparent()))
        job, _ = await store.submit(SPEC, owner="local", queue_cap=10)
        ORIGIN.reset(token)
        tracing.describe({tracing.HTTP_STATUS: 202}, name="POST /v1/jobs")
    await execute(
        job["id"],
        store=store,
        engine=tracing.traced(engine),
        run=run_job,
        shutting_down=asyncio.Event(),
        leases=Leases(store, 30),
        claims=ClaimQueue(store, lease=30, max_attempts=3),
    )
    return str(job["id"])


async def test_engine_calls_of_a_job_are_below_the_span_of_its_request(
    store: JobStore, spans: InMemorySpanExporter
) -> None:
    job_id = await run(store, ScriptedEngine())
    job = await store.get(job_id)
    found = {span.name: span for span in spans.get_finished_spans()}
    request, work, call = (found[name] for name in ("POST /v1/jobs", "attempt", "generate policy"))
    assert {span.context.trace_id for span in spans.get_finished_spans() if span.context} == {_id(request)[0]}
    assert request.parent is None
    own = _id(request)[0], derive_span_id(job_id, JOB)  # the job's own span, exported when it has ended
    assert (_parent(work), _parent(call), _parent(found["score prm"])) == (own, _id(work), _id(work))
    assert work.attributes is not None
    assert (work.attributes[tracing.JOB_ID], work.attributes[tracing.REQUEST_ID]) == (job_id, "r1")
    assert work.attributes[tracing.STATUS] == job["status"] == "completed"
    calls = [span for span in spans.get_finished_spans() if span.name == call.name]
    tokens = sum(int(str((span.attributes or {})[tracing.GENERATED])) for span in calls)
    assert tokens == job["usage"]["generated"] > 0
    assert "gen_ai.usage" not in "".join(span.to_json() for span in calls)  # the tokens are the nodes'
    assert "quick" not in "".join(span.to_json() for span in spans.get_finished_spans())


async def test_requests_to_an_engine_carry_the_span_that_they_are_made_in(spans: InMemorySpanExporter) -> None:
    sent: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("traceparent"))
        return httpx.Response(200, json={"tokens": [1]})

    engine = HttpEngine("http://engine", dialect="vllm")
    plain = engine._connection._http
    engine._connection._http = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))
    with tracing.span("job", "consumer", {}):
        expected = tracing.traceparent()
        await asyncio.create_task(engine.tokenize(TokenizeRequest("m", "a")))  # as branches are
    await engine.tokenize(TokenizeRequest("m", "a"))
    assert expected
    assert sent == [expected, None]
    await engine.close()
    await plain.aclose()


async def test_an_engine_failure_is_recorded_by_type_without_its_message(
    spans: InMemorySpanExporter,
) -> None:
    engine = tracing.traced(ScriptedEngine(die_after=0))
    request = GenerateRequest("r", "policy", (5,), (Branch(1, 1, 4),))
    with pytest.raises(EngineUnavailable):
        [event async for event in engine.generate(request)]
    (span,) = spans.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "EngineUnavailable"
    assert span.status.status_code == StatusCode.ERROR
    assert "gone" not in span.to_json()


async def test_a_traced_engine_returns_the_results_of_the_wrapped_one(spans: InMemorySpanExporter) -> None:
    plain, request = ScriptedEngine(), GenerateRequest("r", "policy", (5,), (Branch(1, 1, 4), Branch(1, 2, 4)))
    engine = tracing.traced(ScriptedEngine())
    assert [event async for event in engine.generate(request)] == [event async for event in plain.generate(request)]
    assert await engine.models() == await plain.models()
    assert await engine.tokenize(TokenizeRequest("policy", "1 + 1?")) == await plain.tokenize(
        TokenizeRequest("policy", "1 + 1?")
    )


def test_without_tracing_the_engine_is_unwrapped_and_a_request_has_no_traceparent() -> None:
    engine = ScriptedEngine()
    assert tracing.traced(engine) is engine
    with tracing.span("POST", "server", {}):
        assert tracing.traceparent() == ""


def test_an_invalid_traceparent_begins_a_new_trace(spans: InMemorySpanExporter) -> None:
    for sent in ("nonsense", "00-0-0-0", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        with tracing.span("POST", "server", {}, parent=sent):
            assert tracing.traceparent()
    assert [span.parent for span in spans.get_finished_spans()] == [None] * 3


def test_remaining_spans_are_exported_when_a_process_ends() -> None:
    with Collector() as collector:
        program = (
            "import sys; from workers.telemetry import tracing; from workers.config.settings import load_settings\n"
            "tracing.start_tracing(load_settings(otlp_url=sys.argv[1]), 'worker')\n"
            "with tracing.span('job', 'consumer', {}): pass"
        )
        subprocess.run([sys.executable, "-c", program, collector.url], check=True, timeout=60)
    assert [(service, span.name) for service, span in collector.spans()] == [("reasoner-worker", "job")]


@pytest.mark.parametrize("installed", [True, False])
def test_without_a_collector_the_extra_is_neither_imported_nor_required(installed: bool) -> None:
    # FastAPI imports OpenTelemetry's API, and redis-py its metrics if installed: only our spans are checked.
    program = (
        f"import sys; sys.modules.update({{}} if {installed} else {{'opentelemetry.sdk': None}})\n"
        "import api.roles.serve; from workers.telemetry.tracing import start_tracing\n"
        "from workers.config.settings import load_settings\n"
        "start_tracing(load_settings(), 'api')\n"
        "parts = ('opentelemetry.sdk.trace', 'opentelemetry.exporter')\n"
        "print([name for name in sys.modules if name.startswith(parts)])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"


def test_a_collector_without_the_extra_raises_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"reasoner\[otel\]"):
        tracing.start_tracing(load_settings(otlp_url="http://127.0.0.1:4318"), "api")


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://", "http:///v1/traces"])
def test_a_collector_without_an_http_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        load_settings(otlp_url=url)


def _id(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def _parent(span: ReadableSpan) -> tuple[int, int]:
    assert span.parent is not None
    return span.parent.trace_id, span.parent.span_id
