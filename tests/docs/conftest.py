"""A service for the examples of the documentation, and an environment in which they find it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.chaos.processes import until
from tests.docs.blocks import ROOT

START_SECONDS = 280.0
"""Kernels may have to be compiled first, beside other tests."""
RUN_SECONDS = 150.0


@dataclass(frozen=True)
class Service:
    """A running service, and a shell that knows it."""

    url: str
    environment: dict[str, str]

    def run(self, *command: str, cwd: Path) -> str:
        """Return what a command printed; fail with its output if it failed."""
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """``reasoner serve`` with the bundled models and the settings of the tutorial on budgets."""
    home = tmp_path_factory.mktemp("s")
    configuration = re.search(r"```toml\n(.*?)```", (ROOT / "docs/tutorials/budgets.md").read_text(), re.DOTALL)
    assert configuration is not None
    more = "".join(f'[models.{name}]\npath = "{name}"\n' for name in ("policy-thinking", "policy-python", "checker"))
    (home / "reasoner.toml").write_text(configuration[1] + more)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REASONER_")}
    environment |= {"PYTHONPATH": str(ROOT), "REASONER_URL": url, "COLUMNS": "120"}
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}  # for curl; our own commands need neither
    commands = home / "bin"
    commands.mkdir()
    for name, words in (("python", ""), ("reasoner", " -m api.cli.main")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (commands / name).chmod(0o755)
    environment["PATH"] = f"{commands}:{environment['PATH']}"
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [str(commands / "reasoner"), "serve", "--port", str(port)],
            cwd=home, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            _wait_until_ready(url, process, home / "log")
            yield Service(url, environment)
        finally:
            process.terminate()
            process.wait(30)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/readyz", timeout=10).is_success
        except httpx.TransportError:
            return False  # it does not listen yet

    try:
        until(is_ready, "the service is ready", seconds=START_SECONDS)
    except AssertionError as error:
        error.add_note(log.read_text())
        raise
