"""The commands of the tutorial, as they are written, on the bundled models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from api.roles.supervisor import free_port
from tests.chaos.processes import until
from tests.docs.blocks import Block, blocks
from tests.vllm.servers import ENVIRONMENT, POLICY, PRM, ROOT, VLLM_SETTINGS
from tests.vllm.test_service import PROBLEM

PAGE = ROOT / "docs" / "tutorials" / "vllm.md"
MARK = "not run: make test-vllm runs it"
_SECONDS = 400


def marked() -> list[Block]:
    """Return the blocks in their order: the service, a question to it, our engine instead, and a verifier."""
    return [block for block in blocks(PAGE) if block.mark == MARK]


def run(code: str, folder: Path) -> str:
    """Return the output of commands whose servers end with them."""
    commands = folder / "bin"
    commands.mkdir()
    programs = {
        "reasoner": f"{sys.executable} -m api.cli.main",
        "vllm": f"env {' '.join(f'{name}={value}' for name, value in VLLM_SETTINGS.items())} {ENVIRONMENT}/bin/vllm",
    }
    for name, program in programs.items():
        more = " --enforce-eager --dtype float32 --block-size 32" if name == "vllm" else ""
        (commands / name).write_text(f'#!/bin/sh\nexec {program} "$@"{more}\n')
        (commands / name).chmod(0o755)
    ports = {str(port): str(free_port()) for port in (8000, 8001, 8100, 8200)}
    places = {
        "Qwen/Qwen2.5-7B-Instruct": str(POLICY),
        "/models/my-prm": str(PRM),
        "What is the sum of the first 50 odd numbers?": PROBLEM,  # of the kind that the bundled policy can solve
    }
    for old, new in (ports | places).items():
        code = code.replace(old, new)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REASONER_")}
    environment |= {"PATH": f"{commands}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {"REASONER_PORT": ports["8000"], "REASONER_URL": f"http://127.0.0.1:{ports['8000']}"}
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"set -eux\n{code}"],
            cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(_SECONDS)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            _await_end(process.pid)
    output = (folder / "log").read_text()
    assert status == 0, output[-5000:]
    return output


def _await_end(group: int) -> None:
    """Wait until every process of a group has ended; kill those that do not in time."""

    def has_ended() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    try:
        until(has_ended, "the processes end", 60.0)
    except AssertionError:
        os.killpg(group, signal.SIGKILL)


def test_the_tutorial_has_four_blocks_that_run_here() -> None:
    assert len(marked()) == 4


def test_the_service_on_vllm_answers(tmp_path: Path) -> None:
    serve, solve, _, _ = marked()
    assert '"ready"' in run(serve.code + solve.code, tmp_path)


def test_the_service_on_our_engine_answers(tmp_path: Path) -> None:
    _, _, engine, _ = marked()
    assert '"ready"' in run(engine.code, tmp_path)


def test_the_service_with_a_verifier_on_vllm_answers(tmp_path: Path) -> None:
    serve, _, _, verifier = marked()
    model = serve.code.splitlines()[0]
    assert '"ready"' in run(f"{model}\n{verifier.code}", tmp_path)
