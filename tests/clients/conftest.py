"""One service of ours for all clients: the bundled model with its verifier, and a server whose answers are known."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.upstream import MODEL, Upstream
from tests.listening import listening
from tests.vllm.servers import ROOT, Service, serving

ENVIRONMENT = ROOT / os.environ.get("CLIENTS_ENVIRONMENT", "build/clients")
"""The folder with the clients: a virtual environment, and Node's packages."""
EXAMPLES = Path(__file__).parent / "examples"
SECONDS = 150.0
"""Patience for one client, on a core that is shared with other processes."""

Run = Callable[[str], dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("clients")
            item.add_marker(pytest.mark.timeout(300))


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
        command += [f"{service.url}/v1", MODEL, "policy"]
        environment = os.environ | {"NO_PROXY": "*", "PYTHONWARNINGS": "ignore", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return found

    return run_example
