"""The wheel, installed into a fresh environment as the image of the service does it: its size, its version, a job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml

from api.roles.supervisor import free_port
from benchmarks.service.null_engine import POLICY, VERIFIER
from tests.chaos.processes import process, until
from tests.deploy.tools import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MAX_BYTES = 300 * 1000 * 1000
OURS = ("api", "benchmarks", "engine", "kernels", "prm", "reasoner", "workers")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the wheel of the tracked files, compiled as the image is."""
    folder = tmp_path_factory.mktemp("release")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source")
    (wheel,) = folder.glob("reasoner-*.whl")
    assert wheel.name.startswith(f"reasoner-{VERSION}-")
    run(sys.executable, "-m", "venv", folder / "environment")
    python = folder / "environment" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, *pip[1:], "install", "--no-compile", "-c", constraints, f"{wheel}[otel,mcp]")
    run(python, "-c", "import api.cli.main, api.roles.serve, math_verify")
    return folder / "environment"


def run(*command: str | Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_packages_of_the_service_stay_below_300_mb_and_have_no_torch(environment: Path) -> None:
    (packages,) = environment.glob("lib/python3*/site-packages")
    names = {path.name for path in packages.iterdir()}
    assert names.isdisjoint({"torch", "triton", "numba", "transformers"})
    own = {name for name in names if name in OURS or name in ("pip", "setuptools")}
    total = sum(count_bytes(packages / name) for name in names - own)
    print(f"{total / 1e6:.0f} MB of dependencies")
    assert total < MAX_BYTES


def count_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def test_the_command_says_the_version_which_is_that_of_the_chart(environment: Path) -> None:
    assert run(environment / "bin" / "reasoner", "--version").split()[-1] == VERSION
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "reasoner" / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == VERSION


def test_the_changelog_has_the_version_below_what_is_not_released() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", headings[1])


def test_the_installed_service_runs_a_job_in_front_of_an_engine_elsewhere(environment: Path, tmp_path: Path) -> None:
    port, engine = free_port(), tmp_path / "engine.sock"
    settings = {
        "PYTHONPATH": "",
        "REASONER_DATA_DIR": str(tmp_path),
        "REASONER_ENGINE_URL": f"unix://{engine}",
        "REASONER_MODEL": POLICY,
        "REASONER_PORT": str(port),
        "REASONER_PRM": VERIFIER,
    }
    null_engine = [sys.executable, "-m", "benchmarks.service.null_engine", str(engine), "0"]
    serve = [str(environment / "bin" / "reasoner"), "serve"]
    with (
        process(null_engine, tmp_path / "engine.log"),
        process(serve, tmp_path / "serve.log", settings),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=70) as client,
    ):

        def answers(path: str) -> bool:
            try:
                return client.get(path).status_code == 200
            except httpx.TransportError:
                return False

        until(lambda: answers("/healthz"), "the service answers", seconds=120)
        until(lambda: answers("/readyz"), "the service is ready", seconds=120)
        assert answers("/")  # the page is in the wheel, too
        spec = {"problem": "1 + 1?", "strategy": {"name": "best_of_n", "n": 2}, "seed": 1}
        job = client.post("/v1/jobs", json=spec, headers={"Prefer": "wait=60"}).json()
        assert job["status"] == "completed", job
