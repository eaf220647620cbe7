"""A contest as a new user runs it: killed with -9 twice, it goes on, and spends no more than its tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_command_line import REASONER

ROOT = Path(__file__).parents[2]
TOKENS = 9000

pytestmark = pytest.mark.timeout(300)


def command(out: Path) -> list[str]:
    options = ["--tokens", str(TOKENS), "--hours", "0.05", "--limit", "12", "--out", str(out), "--json"]
    return [*REASONER, "contest", "countdown", *options]


def test_a_contest_that_is_killed_twice_goes_on_and_keeps_to_its_tokens(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REASONER_")}
    environment["PYTHONPATH"] = str(ROOT)
    kept: list[str] = []
    for ended in (1, 4):
        with subprocess.Popen(
            command(tmp_path / "out"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.split(" ")[0].isdigit() and int(line.split(" ")[0]) >= ended:
                    break
            os.killpg(process.pid, signal.SIGKILL)
        lines = (tmp_path / "out" / "contest.jsonl").read_text().splitlines()
        assert lines[: len(kept)] == kept
        assert len(lines) > ended
        kept = lines
    done = subprocess.run(
        command(tmp_path / "out"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=240,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["ended"] == report["answered"] == 12
    assert 0.8 * TOKENS < report["spent_tokens"] <= TOKENS
    assert report["accuracy"]["known"] == 12
    assert (tmp_path / "out" / "contest.jsonl").read_text().splitlines()[: len(kept)] == kept
    again = subprocess.run(
        command(tmp_path / "out"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=240,
        check=True,
    )
    assert json.loads(again.stdout)["problems"] == report["problems"]
