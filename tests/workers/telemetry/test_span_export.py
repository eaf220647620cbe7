"""Spans of ended jobs: each node once, with its score, tokens and cost, whatever dies and however the collector is."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from api.app.app import create_app
from reasoner.budget.prices import Prices
from reasoner.jobs.view import fold_events
from reasoner.run import run_job
from tests.reasoner.search.test_calls import CallingEngine, Sandbox, sandbox
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
from workers.telemetry import span_export, tracing
from workers.telemetry.search_spans import COST, INPUT_MESSAGES, JOB, OUTPUT_MESSAGES, SCORE, derive_span_id
from workers.telemetry.span_export import NotExportedError, SpanExport

__all__ = ["sandbox"]

PRICES = {"policy": Prices(prompt=1.0, cached=0.5, generated=4.0), "prm": Prices(prompt=2.0)}
TRACE, REQUEST = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class BrokenCollector(SpanExporter):
    """A collector that takes nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def make_spec(strategy: str = "best_of_n", **more: Any) -> dict[str, Any]:
    verifier = {"kind": "pairwise"} if strategy == "tournament" else {"kind": "prm", "model": "prm"}
    fields = {"problem": "the quick brown problem", "model": "policy", "verifier": verifier, "seed": 1}
    return build_spec(fields | {"strategy": {"name": strategy}} | more).model_dump()


def make_export(store: JobStore, exporter: SpanExporter, *, with_content: bool = False) -> SpanExport:
    return SpanExport(store, exporter, Resource({}), with_content=with_content)


async def start_export(store: JobStore, *, with_content: bool = False) -> tuple[SpanExport, InMemorySpanExporter]:
    """Return an export that begins now, and the spans that it exports."""
    exporter = InMemorySpanExporter()
    export = make_export(store, exporter, with_content=with_content)
    assert await export.export_ended() == 0
    return export, exporter


async def run(
    store: JobStore, spec: dict[str, Any], *engines: ScriptedEngine, traceparent: str = f"00-{TRACE}-{REQUEST}-01"
) -> str:
    """Run a job on each engine in turn, until it has ended. Return its id."""
    token = ORIGIN.set(Origin("r1", traceparent))
    job, _ = await store.submit(spec, owner="local", queue_cap=10)
    ORIGIN.reset(token)
    for engine in engines or (ScriptedEngine(),):
        await execute(
            job["id"],
            store=store,
            engine=engine,
            run=functools.partial(run_job, prices=PRICES),
            shutting_down=asyncio.Event(),
            leases=Leases(store, 30),
            claims=ClaimQueue(store, lease=30, max_attempts=3),
        )
    return str(job["id"])


def list_ids(exporter: InMemorySpanExporter) -> list[int]:
    return [span.context.span_id for span in exporter.get_finished_spans() if span.context is not None]


def sum_attribute(exporter: InMemorySpanExporter, name: str) -> float:
    return sum(float(str((span.attributes or {}).get(name, 0))) for span in exporter.get_finished_spans())


async def test_each_node_is_a_span_below_that_of_its_parent_with_its_state(store: JobStore) -> None:
    export, exporter = await start_export(store)
    job_id = await run(store, make_spec("beam"))
    job, events = await store.get(job_id), await store.load_events(job_id)
    view = fold_events(events)
    await export.export_ended()

    spans = {span.context.span_id: span for span in exporter.get_finished_spans() if span.context is not None}
    own = spans[derive_span_id(job_id, JOB)]
    assert own.name == "invoke_agent beam"
    assert own.parent is not None
    assert (own.parent.trace_id, own.parent.span_id) == (int(TRACE, 16), int(REQUEST, 16))
    assert {span.context.trace_id for span in spans.values() if span.context} == {int(TRACE, 16)}
    assert own.start_time == round(events[0].at * 1e9)
    assert own.end_time == round(events[-1].at * 1e9)
    assert len(view.nodes) > 3
    for name, node in view.nodes.items():
        if node.parent is None:
            continue
        span = spans.pop(derive_span_id(job_id, name))
        attributes = span.attributes or {}
        assert span.parent is not None
        assert span.parent.span_id == derive_span_id(job_id, node.parent.id or JOB)
        assert span.name == f"text_completion policy {name}"
        assert attributes["gen_ai.operation.name"] == "text_completion"
        assert attributes["gen_ai.request.model"] == "policy"
        assert attributes["gen_ai.usage.output_tokens"] == node.tokens
        assert attributes.get("reasoner.node.score") == node.score
        assert [(event.attributes or {}).get(SCORE) for event in span.events] == [node.score] * len(span.events)
        is_pruned = node.reason == "pruned" and view.best != name
        assert (attributes["reasoner.node.state"] == "pruned") == is_pruned
        assert (attributes["reasoner.node.state"] == "selected") == (view.best == name)
        assert span.start_time is not None
        assert span.end_time is not None
        assert own.start_time <= span.start_time <= span.end_time <= own.end_time
    assert view.num_pruned > 0
    assert job["result"]["node"] == view.best


async def test_a_node_begins_when_it_was_requested(store: JobStore) -> None:
    class SlowEngine(ScriptedEngine):
        async def _pause(self) -> None:
            await asyncio.sleep(0.05)

        async def generate(self, request: Any, *, stream: bool = False) -> Any:
            await self._pause()
            async for event in super().generate(request, stream=stream):
                yield event

    export, exporter = await start_export(store)
    await run(store, make_spec("best_of_n"), SlowEngine())
    await export.export_ended()
    nodes = [span for span in exporter.get_finished_spans() if "text_completion" in span.name]
    assert nodes
    assert all((span.end_time or 0) - (span.start_time or 0) >= 50e6 for span in nodes)


@pytest.mark.parametrize("strategy", ["best_of_n", "beam", "mcts", "tournament", "self_consistency"])
async def test_tokens_and_cost_of_all_spans_add_up_to_the_bill(store: JobStore, strategy: str) -> None:
    export, exporter = await start_export(store)
    job_id = await run(store, make_spec(strategy), ScriptedEngine(held=0.5, thinks=True))
    usage = (await store.get(job_id))["usage"]
    await export.export_ended()
    assert usage["cost"] > 0
    assert sum_attribute(exporter, COST) == pytest.approx(usage["cost"], rel=1e-9)
    assert sum_attribute(exporter, "gen_ai.usage.output_tokens") == usage["generated"] + usage["verifier_generated"]
    read = usage["prompt"] + usage["verifier_computed"] - usage["verifier_generated"] + usage["verifier_cached"]
    assert sum_attribute(exporter, "gen_ai.usage.input_tokens") == read
    cached = usage["cached"] + usage["verifier_cached"]
    assert sum_attribute(exporter, "gen_ai.usage.cache_read.input_tokens") == cached
    assert sum_attribute(exporter, "gen_ai.usage.reasoning.output_tokens") == usage["thought"]


async def test_a_resumed_job_has_each_node_once(store: JobStore) -> None:
    export, exporter = await start_export(store)
    job_id = await run(store, make_spec("beam"), ScriptedEngine(die_after=3))
    assert (await store.get(job_id))["status"] == "queued"
    assert await export.export_ended() == 0
    await store.wake_jobs_waiting_for_engine()
    await execute(
        job_id,
        store=store,
        engine=ScriptedEngine(),
        run=run_job,
        shutting_down=asyncio.Event(),
        leases=Leases(store, 30),
        claims=ClaimQueue(store, lease=30, max_attempts=3),
    )
    assert (await store.get(job_id))["status"] == "completed"
    await export.export_ended()
    assert set(Counter(list_ids(exporter)).values()) == {1}
    nodes = {name for name in fold_events(await store.load_events(job_id)).nodes if name}
    named = {(span.attributes or {}).get("reasoner.node.id") for span in exporter.get_finished_spans()} - {None}
    assert named == nodes


async def test_an_export_that_was_killed_is_repeated_with_the_same_ids(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, exporter = await start_export(store)
    await run(store, make_spec())

    async def die(exported: int) -> bool:
        raise asyncio.CancelledError(exported)

    monkeypatch.setattr(export, "_record", die)
    with pytest.raises(asyncio.CancelledError):
        await export.export_ended()
    sent = list_ids(exporter)
    assert len(sent) > 1
    assert await store.claim_span_export(export._holder, 0.0) is not None  # as when its right to export has ended
    second = InMemorySpanExporter()
    other = make_export(store, second)
    assert await other.export_ended() == len(sent)
    assert list_ids(second) == sent
    assert await other.export_ended() == 0


async def test_one_process_exports_at_a_time_and_another_goes_on(store: JobStore) -> None:
    first, exporter = await start_export(store)
    second, later = InMemorySpanExporter(), make_export(store, InMemorySpanExporter())
    await run(store, make_spec())
    assert await later.export_ended() == 0
    running = asyncio.create_task(first.run())
    await asyncio.sleep(0)
    await first.stop(running)  # exports what has ended, and leaves the rest to others
    assert len(list_ids(exporter)) > 1
    await run(store, make_spec())
    heir = make_export(store, second)
    assert await heir.export_ended() > 1
    assert not set(list_ids(second)) & set(list_ids(exporter))
    assert await first._record(0) is False  # it does not hold the right any more, so it cannot turn back time


async def test_a_collector_that_is_away_loses_no_span(store: JobStore) -> None:
    export, exporter = await start_export(store)
    await run(store, make_spec())
    broken = make_export(store, BrokenCollector())
    await store.claim_span_export(export._holder, 0.0)
    for _ in range(2):
        with pytest.raises(NotExportedError):
            await broken.export_ended()
    await store.claim_span_export(broken._holder, 0.0)
    assert await export.export_ended() == len(exporter.get_finished_spans()) > 1


async def test_spans_that_are_refused_for_an_hour_do_not_stop_others(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "MAX_REFUSED_SECONDS", 0.0)
    await start_export(store)
    await store.command("HSET", "reasoner:spans", "till", 0)
    await run(store, make_spec())
    broken = make_export(store, BrokenCollector())
    assert not await broken._export_and_report()
    assert await broken._export_and_report()
    assert await broken.export_ended() == 0


@pytest.mark.parametrize(("traceparent", "count"), [(f"00-{TRACE}-{REQUEST}-00", 0), ("", 1)])
async def test_only_jobs_of_sampled_requests_are_exported(store: JobStore, traceparent: str, count: int) -> None:
    export, exporter = await start_export(store)
    await run(store, make_spec(), traceparent=traceparent)
    await export.export_ended()
    roots = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert len(roots) == count
    assert bool(exporter.get_finished_spans()) == bool(count)


async def test_a_deleted_job_is_left_out(store: JobStore) -> None:
    export, exporter = await start_export(store)
    await store.delete(await run(store, make_spec()))
    job_id = await run(store, make_spec())
    await export.export_ended()
    jobs = {(span.attributes or {}).get("reasoner.job.id") for span in exporter.get_finished_spans()} - {None}
    assert jobs == {job_id}


async def test_a_failed_job_is_an_error_with_its_code(store: JobStore) -> None:
    export, exporter = await start_export(store)
    await run(store, make_spec() | {"strategy": {"name": "unknown"}})
    await export.export_ended()
    [span] = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert (span.attributes or {})["error.type"] == "invalid_spec"


@pytest.mark.parametrize("with_content", [False, True])
async def test_texts_are_exported_only_when_they_are_asked_for(store: JobStore, with_content: bool) -> None:
    export, exporter = await start_export(store, with_content=with_content)
    job_id = await run(store, make_spec(), ScriptedEngine(thinks=True))
    await export.export_ended()
    spans = exporter.get_finished_spans()
    assert ("quick" in "".join(span.to_json() for span in spans)) == with_content
    texts = [(span.attributes or {}).get(OUTPUT_MESSAGES) for span in spans]
    assert any(texts) == with_content
    if with_content:
        own = next(span for span in spans if span.name.startswith("invoke_agent")).attributes or {}
        question = json.loads(str(own[INPUT_MESSAGES]))[-1]
        assert question["role"] == "user"
        assert "quick brown" in question["parts"][0]["content"]
        for name, node in fold_events(await store.load_events(job_id)).nodes.items():
            span = next((span for span in spans if span.name == f"text_completion policy {name}"), None)
            if span is not None:
                [message] = json.loads(str((span.attributes or {})[OUTPUT_MESSAGES]))
                assert "".join(part["content"] for part in message["parts"]) == node.text


@pytest.mark.parametrize(
    ("value", "expected"), [("", False), ("true", True), ("SPAN_ONLY", True), ("EVENT_ONLY", False)]
)
def test_the_variable_of_opentelemetry_allows_texts(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv(tracing.CONTENT_VARIABLE, value)
    assert tracing.captures_content() is expected


def test_another_value_of_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.CONTENT_VARIABLE, "yes please")
    with pytest.raises(ConfigError, match="give one of false, no_content"):
        tracing.start_tracing(load_settings(otlp_url="http://127.0.0.1:4318"), "api")


async def test_an_api_process_sends_the_spans_of_ended_jobs_to_its_collector(store: JobStore, url: str) -> None:
    await store.claim_span_export("another", 0.0)  # which has exported everything up to now
    with Collector() as collector:
        settings = load_settings(redis_url=url, otlp_url=collector.url)
        app = create_app(settings, engine=ScriptedEngine())
        async with app.router.lifespan_context(app):
            job_id = await run(store, make_spec())
    nodes = {name for name in fold_events(await store.load_events(job_id)).nodes if name}
    found = [span for _, span in collector.spans()]
    assert {service for service, _ in collector.spans()} == {"reasoner-api"}
    assert {f"text_completion policy {name}" for name in nodes} <= {span.name for span in found}
    assert len({span.span_id for span in found}) == len(found)
    [own] = [span for span in found if span.name == "invoke_agent best_of_n"]
    assert own.span_id == derive_span_id(job_id, JOB).to_bytes(8)
    assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in found)


async def test_a_call_of_a_tool_is_a_span_of_its_node(store: JobStore, sandbox: Sandbox) -> None:
    export, exporter = await start_export(store)
    spec = make_spec("self_consistency", tools=[{"type": "python"}], verifier=None)
    usage = (await store.get(await run(store, spec, CallingEngine())))["usage"]
    await export.export_ended()
    spans = exporter.get_finished_spans()
    calls = [span for span in spans if span.name == "execute_tool python"]
    nodes = {span.context.span_id: span for span in spans if span.context is not None}
    assert len(calls) == usage["tool_calls"] == len(sandbox.calls) > 0
    for call in calls:
        assert call.attributes is not None
        assert call.parent is not None
        node = nodes[call.parent.span_id]
        assert node.attributes is not None
        assert node.attributes["reasoner.node.id"] == call.attributes["reasoner.node.id"]
        assert (call.attributes["gen_ai.operation.name"], call.attributes["gen_ai.tool.name"]) == (
            "execute_tool",
            "python",
        )
        assert (node.start_time or 0) <= (call.start_time or 0) <= (call.end_time or 0) <= (node.end_time or 0)
        assert call.status.is_ok
    assert "call 1" not in "".join(span.to_json() for span in spans)


async def test_a_job_that_cannot_be_read_does_not_keep_back_those_after_it(store: JobStore) -> None:
    export, exporter = await start_export(store)
    ids = [await run(store, make_spec("greedy")) for _ in range(3)]
    await store.command("HSET", f"reasoner:job:{ids[1]}", "spec", "{")
    with structlog.testing.capture_logs() as logs:
        await export.export_ended()
    exported = set(list_ids(exporter))
    assert [derive_span_id(job_id, JOB) in exported for job_id in ids] == [True, False, True]
    assert [entry["job"] for entry in logs if "could not be read" in entry["event"]] == [ids[1]]
    before = len(exporter.get_finished_spans())
    await export.export_ended()
    assert len(exporter.get_finished_spans()) == before
