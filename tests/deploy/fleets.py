"""Roles of this version and of an older one on a broker, with an engine that takes its time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.roles.supervisor import free_port
from benchmarks.service.null_engine import POLICY, VERIFIER
from tests.chaos.processes import process, until
from tests.deploy.tools import ROOT
from workers.broker.embedded import find_server
from workers.processes.children import read_tail, spawn, stop

TOKEN_SECONDS = 0.005


def make_spec(seed: int) -> dict[str, Any]:
    """Return a search of some seconds whose result depends on its seed alone."""
    return {"problem": "1 + 1?", "strategy": {"name": "beam", "n": 4}, "seed": seed}


def check_out(commit: str, folder: Path) -> Path:
    """Return the sources of an older version, or skip the test where the history lacks it."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history has no {commit}: clone it whole")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


@contextlib.contextmanager
def run_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server with an append-only file, as ``compose.yaml`` does."""
    folder.mkdir(exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    options += ["--appendonly", "yes", "--appendfsync", "everysec"]
    server = spawn([find_server(), *options], log=log, death_signal=signal.SIGKILL)
    try:
        until(lambda: "Ready to accept connections" in read_tail(log), "the server is ready")
        yield server
    finally:
        stop(server, grace=10)


class Fleet:
    """The engine, and roles of either version on the broker at ``port``. Ends with its ``with`` block."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._running = contextlib.ExitStack()
        self._count = 0
        self._engine = folder / "engine.sock"
        self._env = {
            "REASONER_DATA_DIR": str(folder),
            "REASONER_ENGINE_URL": f"unix://{self._engine}",
            "REASONER_MODEL": POLICY,
            "REASONER_PRM": VERIFIER,
            "REASONER_REDIS_URL": f"redis://127.0.0.1:{port}/0",
        }

    def __enter__(self) -> Fleet:
        command = [sys.executable, "-m", "benchmarks.service.null_engine", str(self._engine), str(TOKEN_SECONDS)]
        self._running.enter_context(process(command, self._folder / "engine.log"))
        return self

    def __exit__(self, *error: object) -> None:
        self._running.close()

    def start_role(self, name: str, source: Path = ROOT, **env: str) -> subprocess.Popen[bytes]:
        """Start an API or a worker of the version in ``source``."""
        self._count += 1
        log = self._folder / f"{self._count}-{name}.log"
        command = ["env", "-C", str(source), sys.executable, "-m", "api.roles.serve", name]
        return self._running.enter_context(process(command, log, self._env | {"PYTHONPATH": str(source)} | env))

    def start_api(self, source: Path = ROOT) -> tuple[subprocess.Popen[bytes], httpx.Client]:
        """Start an API, and return a client when it is ready."""
        port = free_port()
        api = self.start_role("api", source, REASONER_PORT=str(port))
        client = self._running.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=70))
        until(lambda: has_answer(client), "the API is ready", seconds=120)
        return api, client


def has_answer(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def submit(client: httpx.Client, seeds: range) -> dict[str, int]:
    """Submit a search for each seed. Return the seeds by job."""
    return {client.post("/v1/jobs", json=make_spec(seed)).raise_for_status().json()["id"]: seed for seed in seeds}


def read_results(client: httpx.Client, jobs: dict[str, int]) -> dict[int, Any]:
    """Wait for the ends of all jobs. Return answer and tokens by seed."""
    results = {}
    for job, seed in jobs.items():
        until(lambda job=job: client.get(f"/v1/jobs/{job}").json()["status"] not in ("queued", "in_progress"), job)
        ended = client.get(f"/v1/jobs/{job}").json()
        assert ended["status"] == "completed", ended
        results[seed] = (ended["result"]["text"], ended["usage"]["generated"])
    return results


def count_begun(client: httpx.Client, jobs: dict[str, int]) -> int:
    """Return the number of jobs that have something in their journal, and have not ended."""
    documents = [client.get(f"/v1/jobs/{job}").json() for job in jobs]
    return sum(one["status"] == "in_progress" and one["usage"]["generated"] > 0 for one in documents)


def copy_journal(source: Path, target: Path) -> None:
    """Copy the append-only file of a running server, as the page on backups does."""
    shutil.copytree(source / "appendonlydir", target / "appendonlydir")


def end(role: subprocess.Popen[bytes]) -> None:
    """Stop a role as an orchestrator does."""
    os.kill(role.pid, signal.SIGTERM)
    role.wait(30)
