"""Stages of the GPU's tests and timings, without a GPU: what they write, what is run again, what counts as failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import decode, host_cost
from benchmarks.gpu.__main__ import STAGES, Command, run_command, run_stage, summarize
from benchmarks.kernels.dry_run import TINY_MODEL
from tests.long import mostly_long

MACHINE = "a GPU, driver 1\n"


def run(title: str, program: str, seconds: float = 60, shards: int = 1) -> Command:
    return Command(title, ("-c", program), seconds, ("-c", "print('dry')"), shards)


def test_a_stage_that_has_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    program = f"import pathlib; pathlib.Path({str(marker)!r}).touch(exist_ok=False); print('a table')"
    monkeypatch.setattr(command, "STAGES", {"engine": (run("steps", program),)})
    assert run_stage("engine", tmp_path, MACHINE)
    text = (tmp_path / "engine.txt").read_text()
    assert text.startswith(MACHINE)
    assert "a table" in text
    assert run_stage("engine", tmp_path, MACHINE)  # a second run would find the marker and fail
    marker.unlink()


def test_a_failed_or_slow_command_fails_its_stage_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = "import threading; print('begun', flush=True); threading.Event().wait()"
    commands = run("slow", wait, 3), run("broken", "raise SystemExit(3)"), run("sound", "print('the last one')")
    monkeypatch.setattr(command, "STAGES", {"kernels": commands})
    assert not run_stage("kernels", tmp_path, MACHINE)
    text = (tmp_path / "kernels.partial.txt").read_text()
    for words in ("begun", "stopped, being too slow", "failed after", "the last one", "passed after"):
        assert words in text
    assert not (tmp_path / "kernels.txt").exists()


@pytest.mark.parametrize("is_red", [False, True])
def test_the_summary_says_red_or_green_first_and_then_the_machine(is_red: bool, tmp_path: Path) -> None:
    lines = summarize({"correctness": True, "engine": not is_red}, tmp_path, MACHINE).splitlines()
    assert lines[0] == ("RED: engine failed" if is_red else "green: correctness, engine passed")
    assert lines[1] == MACHINE.strip()
    assert lines[2] == f"passed: {tmp_path / 'correctness'}.txt"
    assert lines[3].startswith("FAILED" if is_red else "passed")


def test_every_stage_takes_less_than_nine_minutes() -> None:
    assert {name: sum(part.seconds for part in parts) for name, parts in STAGES.items()} == {
        "correctness": 500,
        "engine": 450,
        "kernels": 500,
        "recurrent": 250,
        "cascade": 150,
        "cold-start": 300,
    }


@pytest.mark.long
def test_shards_run_every_test_once_and_one_without_tests_passes(tmp_path: Path) -> None:
    """Four processes share three tests, of which one fails."""
    (tmp_path / "test_them.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('number', range(3), ids=['a', 'b', 'broken'])\n"
        "def test_it(number):\n    print('ran', number)\n    assert number != 2\n"
    )
    arguments = (*command._PYTEST, "-rP", str(tmp_path))
    output, status, _ = run_command(Command("tests", arguments, 60, (), 4), tmp_path)
    assert status == "failed"
    assert sorted(re.findall(r"^ran (\d)", output, re.MULTILINE)) == list("012")
    output, status, _ = run_command(Command("tests", (*arguments, "-k", "not broken"), 60, (), 4), tmp_path)
    assert status == "passed", output
    output, status, _ = run_command(Command("no tests", (*arguments, "-k", "nothing"), 60, (), 1), tmp_path)
    assert status == "failed", output


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_stage_runs_without_a_gpu_at_tiny_sizes(tmp_path: Path) -> None:
    assert command.main(["--dry-run", "--out", str(tmp_path)]) == 0
    assert (tmp_path / command.DRY_RUN / "summary.txt").read_text().startswith("green: ")
    assert all((tmp_path / command.DRY_RUN / f"{stage}.txt").exists() for stage in STAGES)


def test_bytes_of_a_step_are_its_weights_and_keys() -> None:
    """Computed by hand for a model of one layer: 16 bits for a weight, shared keys once."""
    sizes = TINY_MODEL | {"num_hidden_layers": 1}
    weights = 128 * (2 * 128 + 2 * 64 + 3 * 256) + 512 * 128
    tokens = 2 * (100 - 60) + 60 + 2 * (40 + 50)
    work = decode.Work.parse("2:100:60")
    assert decode.count_bytes(work, sizes, int4=False, kv_dtype="auto") == 2 * weights + 2 * tokens * 128


def test_bytes_of_a_step_with_states_are_those_of_its_layers_and_states() -> None:
    """Computed by hand for a layer of each kind: gated attention, and a delta rule whose state is read and written."""
    sizes = decode.add_states(TINY_MODEL, tiny=True)
    gated = 128 * (3 * 128 + 2 * 64)
    delta = 128 * (2 * 32 + 3 * 64 + 2 * 4)
    weights = gated + delta + 2 * 128 * 3 * 256 + 512 * 128
    state = 4 * (3 * (2 * 32 + 64) + 4 * 16 * 16)
    work = decode.Work.parse("2:100")
    tokens = 2 * (100 + 40 + 50)
    expected = 2 * weights + 2 * tokens * 128 + 2 * 2 * state
    assert decode.count_bytes(work, sizes, int4=False, kv_dtype="auto") == expected


@pytest.mark.parametrize("options", mostly_long(["", "--hybrid"], every=2))
def test_the_decoding_step_is_timed_on_an_emulated_gpu(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--tiny", *options.split(), "2:64:32"]) == 0
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
