"""Stages of the GPU's tests and timings, without a GPU: what they write, what is run again, what counts as failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import decode, host_cost
from benchmarks.gpu.__main__ import Command, run_stage
from benchmarks.kernels.dry_run import TINY_MODEL


def test_a_stage_that_has_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    program = f"import pathlib; pathlib.Path({str(marker)!r}).touch(exist_ok=False); print('a table')"
    monkeypatch.setattr(command, "STAGES", {"engine": (Command("steps", ("-c", program), 60),)})
    assert run_stage("engine", tmp_path)
    assert "a table" in (tmp_path / "engine.txt").read_text()
    assert run_stage("engine", tmp_path)  # a second run would find the marker and fail
    marker.unlink()


def test_a_failed_or_slow_command_fails_its_stage_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = "import threading; print('begun', flush=True); threading.Event().wait()"
    commands = Command("slow", ("-c", wait), 3), Command("broken", ("-c", "raise SystemExit(3)"), 60)
    last = Command("sound", ("-c", "print('the last one')"), 60)
    monkeypatch.setattr(command, "STAGES", {"kernels": (*commands, last)})
    assert not run_stage("kernels", tmp_path)
    text = (tmp_path / "kernels.partial.txt").read_text()
    for words in ("begun", "stopped, being too slow", "failed after", "the last one", "passed after"):
        assert words in text
    assert not (tmp_path / "kernels.txt").exists()


def test_bytes_of_a_step_are_its_weights_and_keys() -> None:
    """Computed by hand for a model of one layer: 16 bits for a weight, shared keys once."""
    sizes = TINY_MODEL | {"num_hidden_layers": 1}
    weights = 128 * (2 * 128 + 2 * 64 + 3 * 256) + 512 * 128
    tokens = 2 * (100 - 60) + 60 + 2 * (40 + 50)
    work = decode.Work.parse("2:100:60")
    assert decode.count_bytes(work, sizes, int4=False, kv_dtype="auto") == 2 * weights + 2 * tokens * 128


def test_the_decoding_step_is_timed_on_an_emulated_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--tiny", "2:64:32"]) == 0
    assert "2 × 64, 32 of them shared: loaded in" in capsys.readouterr().out


def test_the_host_cost_of_a_step_is_measured_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert host_cost.main(["--steps", "3", "--batches", "2", "--out", str(tmp_path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == len(host_cost.VARIANTS)
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("# ")
    assert all(row in table for row in rows)
    for row in rows:
        assert all(float(cell) >= 0 for cell in row.split("|")[3:-1])
