"""Prometheus' rules by promtool: each alert fires in a service that is healthy but for its reason, and only there."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import find_scaling_query
from tests.deploy.tools import ROOT, find_prometheus

RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
EVALUATED = "35m"
GPU1, GPU2 = 'engine="http://gpu1:8100"', 'engine="http://gpu2:8100"'

HEALTHY = {
    'reasoner_jobs{status="queued"}': "3+0x40",
    'reasoner_jobs{status="queued", instance="second"}': "3+0x40",
    'reasoner_jobs{status="in_progress"}': "32+0x40",
    "reasoner_dead_jobs{}": "0+0x40",
    "reasoner_queue_cap{}": "10000+0x40",
    "reasoner_queue_wait_seconds_count{}": "0+60x40",
    "reasoner_lease_reclaims_total{}": "7+0x40",
    'reasoner_jobs_finished_total{status="completed"}': "0+60x40",
    'reasoner_jobs_finished_total{status="failed"}': "0+1x40",
    f"reasoner_engine_up{{{GPU1}}}": "1+0x40",
    f"reasoner_engine_up{{{GPU2}}}": "1+0x40",
    f"reasoner_engine_requests_total{{{GPU1}}}": "0+600x40",
    f"reasoner_engine_failures_total{{{GPU1}}}": "0+1x40",
    'reasoner_engine_requests_total{model="policy", kind="generate"}': "0+600x40",
    'reasoner_http_requests_total{method="POST", route="/v1/jobs", status="202"}': "0+60x40",
    'reasoner_http_requests_total{method="GET", route="/readyz", status="503"}': "0+12x40",
    "reasoner_broker_memory_bytes{}": "200000000+0x40",
    "reasoner_broker_memory_limit_bytes{}": "1000000000+0x40",
    "reasoner_archive_up{}": "1+0x40",
    'reasoner_webhooks_total{outcome="failed"}': "4+0x40",
    'reasoner_engine_offload_write_failures_total{model="policy"}': "0+0x40",
}
"""Samples per minute in promtool's notation: the first value, the step and the number of steps."""


@dataclass(frozen=True)
class Fault:
    """A series that differs from a healthy service, and the alert's text and labels besides namespace and severity."""

    summary: str
    changes: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)


FAULTS = {
    "ReasonerNoEngine": Fault(
        "No engine answers, so that all jobs wait",
        {f"reasoner_engine_up{{{GPU1}}}": "0+0x40", f"reasoner_engine_up{{{GPU2}}}": "0+0x40"},
    ),
    "ReasonerEngineAway": Fault(
        "The engine http://gpu2:8100 does not answer",
        {f"reasoner_engine_up{{{GPU2}}}": "0+0x40"},
        {"engine": "http://gpu2:8100"},
    ),
    "ReasonerNoJobRuns": Fault(
        "3 jobs wait and none runs, although an engine answers", {'reasoner_jobs{status="in_progress"}': "0+0x40"}
    ),
    "ReasonerQueueNearlyFull": Fault(
        "8001 jobs wait: soon further ones are refused with 503",
        {'reasoner_jobs{status="queued"}': "8001+0x40", "reasoner_queue_wait_seconds_count{}": "0+6000x40"},
    ),
    "ReasonerLongWait": Fault(
        "A job that is submitted now waits for about 20m 0s", {'reasoner_jobs{status="queued"}': "1200+0x40"}
    ),
    "ReasonerWorkersLost": Fault(
        "15 jobs lost their worker in 15 minutes", {"reasoner_lease_reclaims_total{}": "0+1x40"}
    ),
    "ReasonerDeadJobs": Fault(
        "Jobs given up because they lost their worker again and again: 1", {"reasoner_dead_jobs{}": "1+0x40"}
    ),
    "ReasonerJobsFail": Fault(
        "150 jobs failed in 15 minutes, more than a tenth of all",
        {'reasoner_jobs_finished_total{status="failed"}': "0+10x40"},
    ),
    "ReasonerEngineFails": Fault(
        "http://gpu1:8100 failed 900 requests in 15 minutes, more than a twentieth",
        {f"reasoner_engine_failures_total{{{GPU1}}}": "0+60x40"},
        {"engine": "http://gpu1:8100"},
    ),
    "ReasonerServerErrors": Fault(
        "More than a twentieth of all requests end with an error of the service",
        {'reasoner_http_requests_total{method="POST", route="/v1/jobs", status="500"}': "0+6x40"},
    ),
    "ReasonerBrokerMemory": Fault(
        "Redis uses 858.3MiB, most of its maxmemory: a full one takes no more jobs",
        {"reasoner_broker_memory_bytes{}": "900000000+0x40"},
    ),
    "ReasonerArchiveAway": Fault(
        "The archive does not answer, so that ended jobs stay in Redis", {"reasoner_archive_up{}": "0+0x40"}
    ),
    "ReasonerWebhooksFail": Fault(
        "35 webhooks were given up in an hour", {'reasoner_webhooks_total{outcome="failed"}': "0+1x40"}
    ),
    "ReasonerCacheDisk": Fault(
        "The engine of policy cannot write evicted prefixes to its disk",
        {'reasoner_engine_offload_write_failures_total{model="policy"}': "1+0x40"},
        {"model": "policy"},
    ),
}
IMPLIED = {"ReasonerNoEngine": {"ReasonerEngineAway"}}
"""Alerts that a fault of another cannot leave silent."""


def test_a_healthy_service_fires_nothing_and_its_wait_is_the_queue_by_the_rate_of_starts(tmp_path: Path) -> None:
    sample = {"labels": 'reasoner:estimated_wait_seconds{namespace="prod"}', "value": 3}
    wait = {"expr": "reasoner:estimated_wait_seconds", "eval_time": EVALUATED, "exp_samples": [sample]}
    check(tmp_path, HEALTHY, [expect_silence(name) for name in ALERTS], promql_expr_test=[wait])


@pytest.mark.parametrize("name", FAULTS)
def test_an_alert_fires_for_its_reason_and_no_other_does(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    labels = {"namespace": "prod"} | fault.labels
    silent = [expect_silence(other) for other in ALERTS if other not in {name, *IMPLIED.get(name, ())}]
    check(tmp_path, HEALTHY | fault.changes, [expect_alert(name, fault.summary, labels), *silent])


def test_a_service_that_tells_nothing_is_down(tmp_path: Path) -> None:
    summary = "No API process answers Prometheus, or none reaches Redis"
    check(tmp_path, {}, [expect_alert("ReasonerDown", summary, {})])


def test_every_alert_has_a_fault_that_fires_it_and_a_section_that_says_what_to_do() -> None:
    page = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    assert set(ALERTS) == {*FAULTS, "ReasonerDown"}
    assert re.findall(r"^## (Reasoner\w+)$", page, re.MULTILINE) == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"how-to/alerts.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


RUNNING, READY, ENDED = 20, 100, 10
BUSY = {
    'reasoner_queue_jobs{queue="interactive", state="running"}': f"{RUNNING}+0x40",
    'reasoner_queue_jobs{queue="interactive", state="ready"}': f"{READY}+0x40",
    'reasoner_queue_jobs{queue="batch", state="running"}': "7+0x40",
    'reasoner_queue_jobs{queue="batch", state="ready"}': "0+0x40",
    'reasoner_jobs_finished_total{status="completed"}': f"0+{ENDED}x40",
    'reasoner_jobs_finished_total{status="failed"}': "0+0x40",
}


@pytest.mark.parametrize(
    ("pool", "mean_seconds", "slots"),
    [
        ("interactive", 6, RUNNING + READY * 6 / 30),
        ("interactive", 3000, RUNNING + READY),
        ("interactive", None, RUNNING + READY),
        ("batch", 6, 7),
    ],
    ids=["short jobs share slots", "long jobs need one each", "nothing has ended yet", "the other queue"],
)
def test_a_pool_is_scaled_to_the_slots_by_which_waiting_jobs_begin_within_the_target(
    pool: str, mean_seconds: int | None, slots: float, tmp_path: Path
) -> None:
    worked = {"reasoner_work_seconds_total{}": f"0+{ENDED * (mean_seconds or 0)}x40"}
    samples = BUSY | worked
    if mean_seconds is None:
        samples |= {'reasoner_jobs_finished_total{status="completed"}': "0+0x40"}
    sample = {"labels": "{}", "value": slots}
    expected = {"expr": find_scaling_query(pool), "eval_time": EVALUATED, "exp_samples": [sample]}
    check(tmp_path, samples, [], promql_expr_test=[expected])


def expect_silence(name: str) -> dict[str, Any]:
    return {"eval_time": EVALUATED, "alertname": name, "exp_alerts": []}


def expect_alert(name: str, summary: str, labels: dict[str, str]) -> dict[str, Any]:
    rule = ALERTS[name]
    annotations = {"summary": summary, "runbook": rule["annotations"]["runbook"]}
    alert = {"exp_labels": labels | rule["labels"], "exp_annotations": annotations}
    return {"eval_time": EVALUATED, "alertname": name, "exp_alerts": [alert]}


def check(folder: Path, samples: dict[str, str], alerts: list[dict[str, Any]], **further: Any) -> None:
    """Let promtool compare the alerts that these samples fire with the expected ones."""
    program = find_prometheus("promtool")
    series = [
        {"series": name.replace("{", '{namespace="prod", '), "values": values} for name, values in samples.items()
    ]
    case = {"interval": "1m", "input_series": series, "alert_rule_test": alerts} | further
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}
    (folder / "case.yaml").write_text(json.dumps(document))  # JSON is YAML
    command = [program, "test", "rules", str(folder / "case.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
