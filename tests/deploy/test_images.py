"""The Dockerfile and the compose files as hadolint and Docker Compose read them; no image is built here."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.deploy.tools import ROOT, find_tool

SECRETS = {"REASONER_API_KEYS": "k" * 32, "REASONER_REDIS_API": "a" * 32, "REASONER_REDIS_WORKER": "w" * 32}


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    run = subprocess.run([find_tool("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


def configure(*files: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Let Compose merge the files and expand their variables."""
    named = [part for file in files for part in ("-f", str(ROOT / file))]
    command = [find_tool("docker-compose"), *named, "config", "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, timeout=60, check=False)


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]], ids=["cpu", "gpu"])
def test_compose_accepts_its_files_and_builds_the_engine_for_the_device(files: list[str]) -> None:
    run = configure(*files, **SECRETS)
    assert run.returncode == 0, run.stderr
    services = json.loads(run.stdout)["services"]
    assert services["engine"]["build"]["target"] == ("engine-cuda" if "compose.gpu.yaml" in files else "engine-cpu")
    assert services["api"]["image"] == services["worker"]["image"] != services["engine"]["image"]
    assert all(one["deploy"]["resources"]["limits"]["memory"] for one in services.values())


def test_compose_names_a_password_that_is_missing() -> None:
    run = configure("compose.yaml", **SECRETS | {"REASONER_REDIS_API": ""})
    assert run.returncode != 0
    assert "REASONER_REDIS_API" in run.stderr
