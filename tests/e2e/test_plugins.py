"""Packages with a strategy and a verifier, through real API and worker processes, and after they are gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.service.deployment import OURS, Deployment
from benchmarks.service.null_engine import POLICY
from tests.chaos.processes import alive, until
from tests.docs.blocks import ROOT
from tests.packages import install, install_guide

WAITING = """
import asyncio

from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Params, Strategy


async def run(search: Search, params: Params) -> Choice:
    "Sample one solution and wait for ever."
    async for _ in search.complete([search.root], 1):
        pass
    await asyncio.Event().wait()
    return Choice(None)


STRATEGY = Strategy("waiting", Params, run)
"""


def spec(**fields: Any) -> dict[str, Any]:
    return {"problem": "What is the answer?", "model": POLICY, "seed": 3, "answer": "text", "verifier": None} | fields


@pytest.mark.timeout(240)
def test_packages_run_through_api_and_worker_and_are_missed_when_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guides = ROOT / "docs" / "how-to"
    install_guide(tmp_path, guides / "add-a-strategy.md", "strategy")
    install_guide(tmp_path, guides / "add-a-verifier.md", "verifier")
    install(tmp_path, "acme-waiting", {"reasoner.strategies": {"waiting": "w:STRATEGY"}}, {"w": WAITING})
    install(tmp_path, "acme-broken", {"reasoner.strategies": {"broken": "b:STRATEGY"}}, {"b": "import no_such_module"})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with Deployment(0.0, concurrency=2) as deployment:
        worker = deployment.start(OURS, "worker")
        deployment.start(OURS, "api")
        with httpx.Client(base_url=deployment.url(OURS), timeout=70) as client:
            listed = client.get("/v1/strategies").raise_for_status().json()
            packages = {entry["name"]: entry["package"] for entry in listed["data"]}
            assert (packages["shortest"], packages["beam"]) == ("reasoner-shortest 0.1.0", "reasoner")
            assert [entry["package"] for entry in listed["left_out"]] == ["acme-broken 1.0"]
            kinds = {entry["kind"]: entry for entry in client.get("/v1/verifiers").raise_for_status().json()["data"]}
            assert kinds["congruent"]["package"] == "reasoner-congruent 0.1.0"
            schemas = client.get("/openapi.json").json()["components"]["schemas"]
            assert "modulus" in schemas["CongruentVerifier"]["properties"]

            def submit(**fields: Any) -> dict[str, Any]:
                answer = client.post("/v1/jobs", json=spec(**fields), headers={"Prefer": "wait=60"})
                document: dict[str, Any] = answer.raise_for_status().json()
                return document

            done = submit(strategy={"name": "shortest", "n": 4})
            assert (done["status"], bool(done["result"]["text"])) == ("completed", True), done
            congruent = {"kind": "congruent", "modulus": 1}
            scored = submit(strategy={"name": "best_of_n", "n": 2}, verifier=congruent, answer="math")
            assert scored["status"] == "completed", scored
            assert scored["result"]["confidence"] == 1.0

            refused = client.post("/v1/jobs", json=spec(verifier=congruent | {"modulus": 0}))
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "verifier.modulus")
            refused = client.post("/v1/jobs", json=spec(strategy={"name": "broken"}))
            assert refused.status_code == 422
            assert "'broken' of the package acme-broken 1.0 is left out" in refused.json()["detail"]

            begun = client.post("/v1/jobs", json=spec(strategy={"name": "waiting"})).raise_for_status().json()["id"]
            waiting = f"/v1/jobs/{begun}"
            until(lambda: client.get(waiting).json()["usage"]["generated"], "the search has begun")

            monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the worker that goes on with its journal has no packages
            os.kill(worker, 9)
            until(lambda: not alive(worker), "the worker is gone")
            deployment.start(OURS, "worker")
            failed = until(lambda: _ended(client, waiting), "the job ends")
            assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_spec")
            assert "unknown strategy 'waiting'; known are greedy" in failed["error"]["message"]
            assert failed["usage"]["generated"] > 0
            lost = submit(verifier=congruent, strategy={"name": "best_of_n", "n": 2})
            assert (lost["status"], lost["error"]["code"]) == ("failed", "invalid_spec")
            assert "unknown kind of verifier; use one of prm" in lost["error"]["message"]
            shown = _show(lost["id"], deployment.url(OURS))  # by a client that has no packages, either
            assert "unknown kind of verifier" in shown


def _ended(client: httpx.Client, path: str) -> dict[str, Any] | None:
    job: dict[str, Any] = client.get(path).raise_for_status().json()
    return job if job["status"] in ("failed", "completed", "incomplete") else None


def _show(job_id: str, url: str) -> str:
    command = [sys.executable, "-m", "api.cli.main", "jobs", "show", job_id, "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr
