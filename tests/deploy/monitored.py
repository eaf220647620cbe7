"""A service of real processes, scraped by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from api.roles.supervisor import free_port
from tests.chaos.processes import process, role, until
from tests.deploy.tools import ROOT, find_prometheus
from workers.broker.embedded import EmbeddedBroker
from workers.config.broker_address import socket_url
from workers.config.settings import load_settings

PROBLEM = "Reach 10 from 9, 5 and 6: use each number exactly once, with + - * /."


@contextlib.contextmanager
def monitor(folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of the Prometheus that has scraped APIs and engine, and evaluated our rules.

    The service has ended jobs, one of two engines is away, and a request has failed with 503.
    """
    program = find_prometheus("prometheus")
    with contextlib.ExitStack() as running:
        engine, away, api = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
        broker = running.enter_context(EmbeddedBroker(folder))
        settings = load_settings(
            redis_url=socket_url(broker.socket), data_dir=folder, port=int(api.rpartition(":")[2]),
            engine_url=f"{away},{engine}", queue_cap=1, archive_url=f"sqlite:///{folder}/archive.sqlite",
        )  # fmt: skip
        running.enter_context(role("api", settings, folder / "api.log"))
        running.enter_context(role("worker", settings, folder / "worker.log"))
        client = running.enter_context(httpx.Client(base_url=api, timeout=70))
        until(lambda: ask(client, "/readyz") == 503, "the API answers that no engine does")
        jobs = [{"problem": PROBLEM, "strategy": {"name": "best_of_n", "n": 2}, "seed": seed} for seed in range(8)]
        assert client.post("/v1/jobs", json=jobs[0]).status_code == 202
        until(lambda: client.post("/v1/jobs", json=jobs[0]).status_code == 503, "the queue is full")
        serve = [
            sys.executable,
            "-m",
            "api.cli.main",
            "engine",
            "--threads",
            "1",
            "--cache-disk",
            str(folder / "cache"),
        ]
        running.enter_context(process(serve, folder / "engine.log", {"REASONER_ENGINE_URL": engine}))
        until(lambda: ask(client, "/readyz") == 200, "the service is ready", seconds=240)
        running.enter_context(process(write_configuration(program, folder, [api, engine]), folder / "prometheus.log"))
        (url,) = (folder / "prometheus.url").read_text().splitlines()
        prometheus = running.enter_context(httpx.Client(base_url=url, timeout=30))
        until(lambda: ask(prometheus, "/-/ready") == 200, "Prometheus is ready")
        until(lambda: query(prometheus, "reasoner_jobs and on () reasoner_engine_running"), "a scrape before the jobs")
        for job in jobs:  # by their ids they would begin at one or the other engine
            ended = client.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"}).json()
            assert ended["status"] == "completed", ended
        until(lambda: query(prometheus, "increase(reasoner_jobs_finished_total[1m]) > 4"), "two scrapes saw the jobs")
        until(lambda: query(prometheus, "reasoner:estimated_wait_seconds"), "the rules are evaluated")
        yield prometheus


def write_configuration(program: str, folder: Path, targets: list[str]) -> list[str]:
    """Return the command of a Prometheus that scrapes these addresses each second."""
    addresses = [url.partition("://")[2] for url in targets]
    labels = {"namespace": "prod"}
    jobs = [{"job_name": "reasoner", "static_configs": [{"targets": addresses, "labels": labels}]}]
    rules = [str(ROOT / "deploy" / "prometheus" / "rules.yaml")]
    intervals = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    path = folder / "prometheus.yml"
    path.write_text(json.dumps({"global": intervals, "rule_files": rules, "scrape_configs": jobs}))
    address = f"127.0.0.1:{free_port()}"
    (folder / "prometheus.url").write_text(f"http://{address}")
    options = {"config.file": path, "storage.tsdb.path": folder / "series", "web.listen-address": address}
    return [program, *(f"--{name}={value}" for name, value in options.items())]


def ask(client: httpx.Client, path: str) -> int:
    """Return the status of an answer; 0 if there is none."""
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


def query(prometheus: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Return the series of a query at this moment."""
    answer = prometheus.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    return list(answer["data"]["result"])
