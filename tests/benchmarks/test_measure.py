"""The whole engine benchmark on a tiny model, with real processes and engines, none of which stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app, run
from benchmarks.engine import measure as measuring
from benchmarks.engine.measure import PEERS, Listener, Measured, Peer, Plan, Row, measure
from benchmarks.engine.process import BenchError, Worker, installed
from benchmarks.engine.report import document, draw, markdown
from tests.benchmarks.test_workloads import TINY

pytestmark = pytest.mark.timeout(180)

FIELDS = {"case", "metric", "unit", "ours", "peer", "peer_value", "ratio"}


@pytest.mark.long
def test_a_run_compares_every_kind_of_case_and_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "absent-engine", Peer(("absent-engine",), "absent-engine"))
    plan = Plan(
        models=("tiny",),
        cases=("W4", "cache-hit", "step"),
        peers=("transformers", "absent-engine"),
        rounds=1,
        sizes={"tiny": TINY},
        cache=tmp_path,
    )
    totals: list[int] = []
    steps: list[str] = []
    said: list[str] = []
    measured = measure(plan, Listener(total=totals.append, step=steps.append, say=said.append))
    assert totals == [len(steps)]
    assert "absent-engine is left out" in said[0]
    assert [peer.peer for peer in measured.left_out] == ["absent-engine"]
    expected = [
        ("W4 tiny", "transformers"),
        ("cache-hit tiny", "10 tokens alone"),
        ("W1 step tiny", "matrix products alone"),
        ("W1 step tiny", "product of 2048³"),
        ("W4 step tiny", "matrix products alone"),
        ("W4 step tiny", "memory read"),
    ]
    assert [(row.case, row.peer) for row in measured.rows] == expected
    for row in measured.rows:
        faster = row.ours / row.peer_value if row.unit != "ms" else row.peer_value / row.ours
        assert row.ratio == pytest.approx(faster)
        assert row.ratio > 0
    told = document(plan, measured)
    assert json.loads(json.dumps(told)) == told
    assert all(set(row) == FIELDS for row in told["rows"])
    assert {"processor", "threads", "versions", "memory_read_gb_s"} <= set(told["machine"])
    assert "| W4 tiny | " in markdown(told, "reasoner bench engine")
    draw(told, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_worker_that_fails_times_out_or_dies_is_reported_with_its_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Worker("ours", tmp_path, threads=1, log=log) as worker:
        with pytest.raises(BenchError, match="ours did not load the checkpoint within 0 seconds"):
            worker.ready(timeout=0)
        with pytest.raises(BenchError, match=r"ours could not load the checkpoint: .*config\.json"):
            worker.ready()
    with pytest.raises(BenchError, match="ours ended before it could run"):
        worker.call("run", case="W4", seed=1)


def test_a_worker_ends_although_its_child_process_continues(tmp_path: Path) -> None:
    """The child inherits the worker's output and keeps it open."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nsleep 1000 &\necho "{\\"error\\": \\"no module safetensors\\"}"\nwait\n')
    python.chmod(0o700)
    with (
        pytest.raises(BenchError, match="could not load the checkpoint: no module safetensors"),
        Worker("ours", tmp_path, threads=1, log=tmp_path / "log", python=str(python)) as worker,
    ):
        worker.ready()


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, threading; from pathlib import Path; from benchmarks.engine.process import BenchError, Worker\n"
        "worker = Worker('ours', Path(sys.argv[1]), threads=1, log=Path(sys.argv[1]) / 'log')\n"
        "try: worker.ready()\n"
        "except BenchError: print(worker.pid, flush=True)\n"  # it has no model, and waits for calls all the same
        "threading.Event().wait()"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": root}) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    pause, deadline = threading.Event(), time.monotonic() + 30
    while _alive(child):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        pause.wait(0.05)  # there is no notification for another process's child: poll


def test_installed_peers_are_determined_by_the_interpreter_that_will_run_them() -> None:
    assert set(installed(("torch", "no-such-package"))) == {"torch"}
    with pytest.raises(BenchError, match="not a Python interpreter"):
        installed(("torch",), "/nowhere/python")


def test_the_command_prints_one_document_and_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("W1", "generated tokens", "tokens/s", 600.0, "transformers", 100.0, 6.0)
    plans: list[Plan] = []

    def instead(plan: Plan, listener: Listener) -> Measured:
        plans.append(plan)
        runs = {"W1": {"ours": [590.0, 600.0, 610.0], "transformers": [100.0, 90.0, 110.0]}}
        return Measured([row], runs, {"torch": "2.13"}, {"read": 2e10, "flops": 1e11})

    monkeypatch.setattr(measuring, "measure", instead)
    command = ["bench", "engine", "--model", "50M", "--case", "W1", "--threads", "2", "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["rows"] == [asdict(row)]
    assert told == json.loads((tmp_path / "results.json").read_text())
    assert "| W1 | 600.0 | 100.0 (6.00×) |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "chart.png").exists()
    assert (plans[0].models, plans[0].cases, plans[0].threads) == (("50M",), ("W1",), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "7B"], "known are 50M, 250M"),
        (["--case", "W5"], "known are W1, W2, W3, W4, prompt, cache-hit, step"),
        (["--peer", "vllm"], "known are transformers"),
        (["--rounds", "0"], "'--rounds'"),
    ],
)
def test_wrong_usage_is_answered_with_the_valid_choice(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("missing", ["benchmarks", "benchmarks.commands", "benchmarks.engine"])
def test_without_the_benchmark_code_the_command_reports_an_error(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for loaded in [name for name in sys.modules if f"{name}.".startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", ["reasoner", "bench", "engine"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 1
    assert "the benchmarks are not installed" in capsys.readouterr().err


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
