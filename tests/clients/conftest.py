"""One service of ours for all clients: the bundled model with its verifier, and a server whose answers are known."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.processes import until
from tests.clients.report import Report
from tests.clients.upstream import MODEL, Upstream
from tests.listening import listening
from tests.vllm.servers import ROOT, Service, serving

ENVIRONMENT = ROOT / os.environ.get("CLIENTS_ENVIRONMENT", "build/clients")
"""The folder with the clients: a virtual environment, and Node's packages."""
HARNESSES = ROOT / os.environ.get("HARNESSES_ENVIRONMENT", "build/harnesses")
"""The virtual environment with harnesses of evaluation."""
PROXY = ROOT / os.environ.get("LITELLM_ENVIRONMENT", "build/litellm")
"""The virtual environment with LiteLLM's proxy."""
AIPERF = ROOT / os.environ.get("AIPERF_ENVIRONMENT", "build/aiperf")
"""The virtual environment with AIPerf."""
PHOENIX = ROOT / os.environ.get("PHOENIX_ENVIRONMENT", "build/phoenix")
"""The virtual environment with Phoenix."""
EXAMPLES = Path(__file__).parent / "examples"
SECONDS = 270.0
"""Patience for one client, on a core that is shared with other processes."""

Run = Callable[[str], dict[str, Any]]
Await = Callable[[int], None]


REPORT = Report(os.environ.get("CLIENTS_REPORT"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("client")
    if marker is not None and (report.when == "call" or not report.passed):
        REPORT.add(report, **marker.kwargs)
    return report


def pytest_sessionfinish() -> None:
    REPORT.write((ENVIRONMENT, HARNESSES, PROXY, AIPERF, PHOENIX))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("clients")
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture(scope="session")
def service(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("clients")
    with listening(upstream.app, folder / "s") as url:
        engine = f'[engines.known]\nurl = "{url}"\nkind = "chat"\nmodels = ["{MODEL}"]\n'
        with serving(folder / "service", {}, engine) as started:
            yield started


@pytest.fixture
def run(service: Service) -> Run:
    """Return a function that runs an example against the service and returns what it prints, which is JSON."""

    def run_example(name: str) -> dict[str, Any]:
        path = EXAMPLES / name
        if path.suffix == ".mjs":  # modules are looked up from the script's own folder
            if not (ENVIRONMENT / "node_modules").exists():
                pytest.skip("Node's packages are not installed: run make test-clients")
            command = ["node", shutil.copy(path, ENVIRONMENT)]
        else:
            if not (ENVIRONMENT / ".installed-python").exists():
                pytest.skip("the clients are not installed: run make test-clients")
            command = [str(ENVIRONMENT / "bin" / "python"), str(path)]
        return run_program([*command, f"{service.url}/v1", MODEL, "policy"])

    return run_example


@pytest.fixture
def await_cancelled(service: Service) -> Await:
    """Return a function that waits until so many jobs more than at the start of the test were cancelled."""

    def count() -> int:
        answer = httpx.get(f"{service.url}/v1/jobs", params={"status": "cancelled", "limit": 100}, timeout=30)
        return len(answer.raise_for_status().json()["data"])

    before = count()
    return lambda number: until(lambda: count() == before + number, f"{number} jobs are cancelled", 60.0)


@pytest.fixture
def run_harness(service: Service, tmp_path: Path) -> Run:
    """Like ``run``, with the environment of the harnesses. Examples may write into their working directory."""

    def run_example(name: str) -> dict[str, Any]:
        if not (HARNESSES / ".installed").exists():
            pytest.skip("the harnesses are not installed: run make test-harnesses")
        command = [str(HARNESSES / "bin" / "python"), str(EXAMPLES / name), f"{service.url}/v1", MODEL]
        return run_program(command, folder=tmp_path)

    return run_example


def run_program(command: list[str], folder: Path | None = None) -> dict[str, Any]:
    """Run a program, and return the JSON of the last line that it prints."""
    environment = os.environ | {
        "NO_PROXY": "*",
        "PYTHONWARNINGS": "ignore",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, cwd=folder)
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
