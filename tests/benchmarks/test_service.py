"""Service benchmark at a small size, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from benchmarks.engine.measure import Listener
from benchmarks.service.deployment import OURS, PLAIN, Deployment, proportional_mib
from benchmarks.service.fairness import Sharing
from benchmarks.service.load import submit_all, wrong
from benchmarks.service.measure import IN_PROCESS, ONE, SHORT, TARGET, ServicePlan, measure, quantile, spans
from benchmarks.service.null_engine import POLICY, STEPS, NullEngine
from benchmarks.service.report import document, draw, markdown

SMALL = ServicePlan(
    rounds=2,
    submissions=5,
    jobs=6,
    token_seconds=0.003,
    beams=4,
    queued=12,
    streams=6,
    concurrency=4,
    crowd=5,
    crowd_token_seconds=0.3,
    backlog=260,
    turns=5,
)
FAIRNESS = "260 queued jobs of one owner, then two others, weights 1, 2, 4"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_has_the_rows_of_all_cases_computed_from_the_single_runs(tmp_path: Path) -> None:
    totals: list[int] = []
    steps: list[str] = []
    said: list[str] = []
    measured = measure(SMALL, Listener(total=totals.append, step=steps.append, say=said.append))
    assert totals == [len(steps)]
    assert said == []  # no faults under load
    rows = {(row.case, row.metric): row for row in measured.rows}
    assert [(row.case, row.metric, row.peer) for row in measured.rows] == [
        ("submit, one client", "submit latency p50", PLAIN),
        ("submit, one client", "submit latency p99", PLAIN),
        ("a batch of 1000 jobs", "submitted jobs per second", TARGET),
        ("6 short jobs", "jobs per second", PLAIN),
        ("6 short jobs", "broker, requests per job", PLAIN),
        ("6 short jobs", "broker, bytes per job", PLAIN),
        ("6 short jobs", "broker, kept per job", PLAIN),
        ("6 short jobs", "broker, CPU per job", PLAIN),
        ("6 short jobs", "memory, worker (PSS)", PLAIN),
        ("6 short jobs", "memory, api (PSS)", PLAIN),
        *(
            ("6 short jobs in the queue", f"jobs per second, {count} worker processes", ONE)
            for count in range(1, (os.cpu_count() or 1) + 1)
        ),
        ("a search of seconds", "submission to result", IN_PROCESS),
        ("a search of seconds", "overhead_fraction", TARGET),
        ("12 queued jobs, 6 open streams", "errors", TARGET),
        ("12 queued jobs, 6 open streams", "memory, api (PSS)", "idle"),
        ("5 searches at once in one worker", "running", TARGET),
        ("5 searches at once in one worker", "age of the last sign of life p99", "lease"),
        ("5 searches at once in one worker", "end after SIGTERM", TARGET),
        ("5 searches at once in one worker", "handed back without an attempt", "running"),
        ("5 searches at once in one worker", "memory, worker (PSS)", "idle"),
        (FAIRNESS, "others' first starts, the later one", TARGET),
        (FAIRNESS, "largest deviation of a share", TARGET),
    ]
    taken = measured.runs["submit, one client"]
    assert [len(each) for each in taken.values()] == [10, 10]
    assert rows["submit, one client", "submit latency p99"].ours == pytest.approx(1000 * max(taken[OURS]))
    searches = measured.runs["a search of seconds"]
    ours, alone = (statistics.median(searches[way]) for way in (OURS, IN_PROCESS))
    overhead = rows["a search of seconds", "overhead_fraction"]
    assert overhead.ours == pytest.approx((ours - alone) / alone)
    # Nothing is faster than its engine: each level of the beam sleeps for at least a step and a score.
    assert min(searches[IN_PROCESS]) > STEPS * (8 + 2) * SMALL.token_seconds
    assert rows["12 queued jobs, 6 open streams", "errors"].ours == 0
    crowd = {row.metric: row for row in measured.rows if row.case == "5 searches at once in one worker"}
    assert crowd["running"].ours == crowd["handed back without an attempt"].ours == 5
    assert len(measured.runs[FAIRNESS]["two"]) == 10
    draw(document(SMALL, measured), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0
    told = document(SMALL, measured)
    assert json.loads(json.dumps(told)) == told
    assert "| overhead_fraction |" in markdown(told, "reasoner bench service")


@pytest.mark.timeout(120)
def test_under_load_a_broken_stream_a_lost_job_and_a_logged_error_are_counted() -> None:
    """Shows that a row without errors is meaningful."""
    assert wrong("job", [1, 2, 3], "job.completed") is None
    assert "gaps" in str(wrong("job", [1, 3], "job.completed"))
    assert "gaps" in str(wrong("job", [1, 2, 2], "job.completed"))
    assert "ended with node" in str(wrong("job", [1, 2], "node"))
    with Deployment(0.0, concurrency=2) as deployment:
        deployment.start(OURS, "api")
        assert deployment.complaints() == []
        (log,) = deployment.folder.glob("api*.log")
        log.write_text(
            '{"event": "x", "level": "info"}\n{"event": "sweep failed", "level": "error"}\nTraceback (most\n'
        )
        assert len(deployment.complaints()) == 2
        (job_id,) = asyncio.run(submit_all(deployment.url(OURS), SHORT, 1))
        assert spans(deployment, OURS, [job_id]) == []
        httpx.post(f"{deployment.url(OURS)}/v1/jobs/{job_id}/cancel").raise_for_status()
        ((created, finished),) = spans(deployment, OURS, [job_id])
        job = httpx.get(f"{deployment.url(OURS)}/v1/jobs/{job_id}").json()
        assert (created, finished) == (job["created_at"], job["finished_at"])


def test_shares_count_while_all_owners_have_jobs_that_wait() -> None:
    """The backlog's owner may not count for what it starts alone, before the others come and after one has left."""
    starts = {
        "one": [-2.0, -1.0, 1.0, 2.0, 9.0, 10.0],
        "two": [0.5, 1.1, 2.1, 3.0],
        "four": [0.7, 0.8, 0.9, 1.2, 1.3, 1.4, 2.9, 3.1],
    }
    sharing = Sharing(starts)
    assert sharing.first_start == 0.7
    # Until 3.0 there are 2, 4 and 7 starts; by their weights it would be 13/7, 26/7 and 52/7.
    assert sharing.deviation == pytest.approx(2 / (13 / 7) - 1)


def test_a_quantile_is_one_of_the_values_with_the_right_number_below() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 50.0, 95.0, 100.0]
    assert quantile([7.0], 0.95) == 7.0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_memory_is_the_sum_over_the_mappings() -> None:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    by_hand = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    # Other processes share some pages, and may start and end between the two readings.
    assert proportional_mib(os.getpid()) == pytest.approx(by_hand, rel=0.05)
    assert proportional_mib(2**22 + 1) is None


async def test_the_null_engine_answers_the_same_request_equally_and_counts_it() -> None:
    engine = NullEngine(0.0)
    body = {
        "request_id": "r",
        "model": POLICY,
        "prompt": [11, 12],
        "stop": ["\n\n"],
        "branches": [{"seed": 1, "key": key, "max_tokens": 100} for key in (1, 2)],
    }
    transport = httpx.ASGITransport(engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        first, again = [(await client.post("/v1/completions", json=body)).text for _ in range(2)]
        cut = await client.post("/v1/completions", json=body | {"branches": [{"seed": 1, "key": 1, "max_tokens": 3}]})
    assert first == again
    said = [token for told in (first, again, cut.text) for each in _completions(told) for token in each["token_ids"]]
    assert engine.asked == {"branches": 5, "scores": 0, "tokens": len(said)}
    steps = {each["index"]: each for each in _completions(first)}
    assert [steps[index]["stop"] for index in (0, 1)] == ["\n\n", "\n\n"]
    assert steps[0]["text"] != steps[1]["text"]
    (piece,) = _completions(cut.text)
    assert piece["finish_reason"] == "length"
    assert piece["token_ids"] == steps[0]["token_ids"][:3]


def _completions(events: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["completion"] for line in lines]


def test_an_unknown_case_is_answered_with_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["bench", "service", "--case", "speed"])
    assert result.exit_code == 2
    assert "submit, bulk, throughput, workers, overhead, load" in " ".join(result.output.replace("│", " ").split())
