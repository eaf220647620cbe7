"""AIPerf measures our service as any other server: its requests are answered, and its tokens are those of our bill."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from reasoner.budget.usage import Usage
from tests.clients.conftest import AIPERF, SECONDS
from tests.vllm.servers import POLICY, Service

NUM_REQUESTS = 10
FIELDS = {"strategy": {"name": "best_of_n", "n": 4}, "metadata": {"run": "aiperf"}, "max_tokens": 1000}
PROBLEM = "Reach 10 from 9, 5 and 6: use each number exactly once, with + - * /."


@pytest.fixture
def measure(service: Service, tmp_path: Path) -> dict[str, Any]:
    """Return what AIPerf writes about a run."""
    if not (AIPERF / ".installed").exists():
        pytest.skip("AIPerf is not installed: run make test-harnesses")
    options = {
        "model": "policy",
        "url": service.url,
        "endpoint-type": "chat",
        "tokenizer": str(POLICY),
        "concurrency": "2",
        "workers-max": "2",
        "request-count": str(NUM_REQUESTS),
        "input-file": str(tmp_path / "questions.jsonl"),
        "custom-dataset-type": "single_turn",
        "extra-inputs": json.dumps(FIELDS),
        "artifact-dir": str(tmp_path / "artifacts"),
        "ui": "none",
    }
    (tmp_path / "questions.jsonl").write_text(f"{json.dumps({'text': PROBLEM})}\n" * NUM_REQUESTS)
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [str(AIPERF / "bin" / "aiperf"), "profile", *given, "--streaming", "--use-server-token-count"]
    environment = os.environ | {"NO_PROXY": "*"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    report: dict[str, Any] = json.loads((tmp_path / "artifacts" / "profile_export_aiperf.json").read_text())
    return report


@pytest.mark.client(name="AIPerf", package="aiperf", runs="stream (ten of best_of_n, two at a time), tokens")
def test_aiperf(service: Service, measure: dict[str, Any]) -> None:
    assert (measure["error_summary"], measure["was_cancelled"]) == ([], False)
    assert measure["request_count"]["avg"] == NUM_REQUESTS
    listed = httpx.get(f"{service.url}/v1/jobs", params={"limit": 100}, timeout=30).raise_for_status().json()["data"]
    jobs = [job for job in listed if job["spec"]["metadata"] == FIELDS["metadata"]]
    assert [job["status"] for job in jobs] == ["completed"] * NUM_REQUESTS
    bills = [Usage.model_validate(job["usage"]) for job in jobs]
    assert measure["total_usage_prompt_tokens"]["avg"] == sum(bill.prompt for bill in bills)
    assert measure["total_usage_prompt_cache_read_tokens"]["avg"] == sum(bill.cached for bill in bills)
    assert measure["total_usage_completion_tokens"]["avg"] == sum(bill.total for bill in bills)
    # A thought counts within the output there, and the tokens that our answers do not show are reasoning.
    assert measure["total_osl"]["avg"] == sum(bill.total for bill in bills)
    assert 0 < measure["time_to_first_token"]["min"] <= measure["time_to_first_output_token"]["min"]
