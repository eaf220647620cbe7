"""A request can be followed through real processes, by its id in their logs and in one trace."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from benchmarks.service.deployment import OURS, Deployment
from benchmarks.service.measure import search_spec
from tests.chaos.processes import until
from tests.workers.collector import Collector

AGENT = "invoke_agent beam"


@pytest.mark.timeout(240)
def test_a_request_is_linked_to_its_job_in_logs_and_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Collector() as collector:
        monkeypatch.setenv("REASONER_OTLP_URL", collector.url)
        with Deployment(0.0, concurrency=2) as deployment:
            deployment.start(OURS, "worker")
            deployment.start(OURS, "api")
            headers = {"X-Request-ID": "a-complaint", "traceparent": caller, "Prefer": "wait=60"}
            url = f"{deployment.url(OURS)}/v1/jobs"
            job = httpx.post(url, json=search_spec(2, seed=1), headers=headers, timeout=70).json()
            assert job["status"] == "completed", job

            def told() -> list[dict[str, Any]]:
                texts = [log.read_text() for log in deployment.folder.glob(f"*{OURS}*.log")]
                whole = [line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
                return [json.loads(line) for line in whole if line.startswith("{")]

            def about() -> dict[str, dict[str, Any]]:
                return {line["event"]: line for line in told() if line.get("request_id") == "a-complaint"}

            # A request is logged after its response was sent.
            until(
                lambda: {"job submitted", "request", "job claimed", "job ended"} <= set(about()), "all is in the logs"
            )
            until(lambda: any(span.name == AGENT for _, span in collector.spans()), "the job's own span was sent")
            lines, events = told(), about()
    assert {line["job"] for line in events.values() if "job" in line} == {job["id"]}
    assert "answer?" not in str(lines)  # no text of the problem

    spans = {(service, span.name): span for service, span in collector.spans()}
    request, own = spans["reasoner-api", "POST /v1/jobs"], spans["reasoner-api", AGENT]
    attempt = spans["reasoner-worker", "attempt"]
    calls = [spans["reasoner-worker", name] for name in ("generate null", "score null-verifier")]
    nodes = [span for (_, name), span in spans.items() if name.startswith("text_completion null ")]
    assert {span.trace_id.hex() for span in (request, own, attempt, *calls, *nodes)} == {caller.split("-")[1]}
    assert request.parent_span_id.hex() == caller.split("-")[2]
    assert own.parent_span_id == request.span_id
    assert attempt.parent_span_id == own.span_id
    assert {span.parent_span_id for span in calls} == {attempt.span_id}
    assert nodes
