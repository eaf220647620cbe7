"""Stages of the GPU's tests and timings, without a GPU: what they write, what is run again, what counts as failed."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import decode, host_cost, rates, search, search_work, speculate
from benchmarks.gpu.__main__ import STAGES, Command, run_command, run_stage, summarize
from benchmarks.kernels.dry_run import TINY_MODEL
from engine.scheduler.draft import Draft
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
        "engine": 500,
        "speculation": 400,
        "search": 500,
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
    assert decode.count_bytes(work, sizes, weights="bf16", kv_dtype="auto") == 2 * weights + 2 * tokens * 128


@pytest.mark.parametrize(("weights", "bits"), [("bf16", 16), ("fp8", 8), ("int4", 4 + 24 / 128)])
def test_bytes_of_a_step_follow_the_type_of_the_weights_and_not_that_of_the_head(weights: str, bits: float) -> None:
    sizes = TINY_MODEL | {"num_hidden_layers": 1}
    count = 128 * (2 * 128 + 2 * 64 + 3 * 256)
    work = decode.Work.parse("1:100")
    expected = int(count * bits / 8 + 2 * 512 * 128 + 2 * (100 + 40 + 50) * 128)
    assert decode.count_bytes(work, sizes, weights=weights, kv_dtype="auto") == expected


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
    assert decode.count_bytes(work, sizes, weights="bf16", kv_dtype="auto") == expected


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


def make_timing(weights: str, batch: int, step_ms: float, *, floor_ms: float, gain: float | None) -> rates.Timing:
    return rates.Timing(weights, "auto", batch, step_ms, floor_ms, gain)


def test_the_table_of_rates_says_which_goals_are_met() -> None:
    """At 1 sequence bf16 should take at most 1 / 0.8 of its floor and give 250 tokens a second, int4 gain 2.2."""
    timings = [
        make_timing("bf16", 1, 3.9, floor_ms=3.6, gain=None),
        make_timing("bf16", 16, 5.0, floor_ms=4.6, gain=None),
        make_timing("int4", 1, 1.7, floor_ms=1.2, gain=2.29),
        make_timing("int4", 16, 3.0, floor_ms=2.2, gain=1.67),
        make_timing("bf16", 4, 4.0, floor_ms=3.8, gain=None),
    ]
    rows = [line.split(" | ") for line in rates.markdown(timings, "NVIDIA H200").splitlines()[4:]]
    assert [row[-1].rstrip(" |") for row in rows] == ["met", "met", "met", "missed", ""]
    assert rows[0][5:9] == ["0.92", "256", "", "0.80 of the floor, 250 tokens/s"]
    slow = rates.markdown([make_timing("bf16", 16, 5.6, floor_ms=4.6, gain=None)], "NVIDIA H200")
    assert "0.80 of the floor, 3,200 tokens/s | missed" in slow
    assert "0.80 of the floor | met" in rates.markdown(timings[:1], "another GPU")


@pytest.mark.parametrize("length", [1.5, 3.0, 4.68])
def test_draft_tokens_are_accepted_until_one_is_refused_and_as_often_as_asked(length: float) -> None:
    draft = Draft.chain(range(speculate.DEPTH), [1.0] * speculate.DEPTH)
    with speculate.accepted_with(speculate.find_probability(length, speculate.DEPTH)) as accept:
        paths = [accept(draft, [0] * (1 + len(draft))) for _ in range(4000)]
    assert all(path == tuple(range(len(path))) for path in paths)
    # The deviation of the mean of 4,000 numbers up to 5 is at most 2.5 / 63.
    assert sum(1 + len(path) for path in paths) / len(paths) == pytest.approx(length, abs=0.2)


def test_of_sibling_draft_tokens_the_first_is_accepted() -> None:
    tree = Draft((7, 8, 9, 10), (-1, -1, 0, 2), (1.0, 1.0, 1.0, 1.0))
    with speculate.accepted_with(1.0) as accept:
        assert accept(tree, [0] * 5) == (0, 2, 3)


def test_a_search_keeps_its_best_beams_and_refuses_steps_of_a_wrong_size() -> None:
    shape = search_work.Search("tree", 10, 4, "prm", rounds=2, survivors=2, tokens=3)
    beams = [search_work.make_prompt(shape, 1).grow((index,) * 3) for index in range(4)]
    kept = search_work.choose(shape, beams, [0.1, 0.9, 0.9, 0.3])
    assert [beam.steps[-1][0] for beam in kept] == [1, 2]
    assert len(kept[0].path) == 13
    with pytest.raises(RuntimeError, match="steps of 3 tokens"):
        search_work.choose(shape, [*beams[:3], beams[0].grow((1, 2))], [0.0] * 4)


def test_the_table_of_searches_has_a_column_for_a_peer_that_ran() -> None:
    shape = search_work.list_tiny_searches()[0]
    rows = [(shape, search_work.Seen(2.0, 0.5, 54))]
    alone = search.markdown(rows, {})
    assert "vLLM" not in alone
    assert f"| {shape.name} | prm | 2.00 s | 0.50 s | 6 | 54 |\n" in alone
    beside = search.markdown(rows, {(shape.name, "prm"): search_work.Seen(3.0, 0.0)})
    assert "| 54 | 3.00 s | 1.50 |\n" in beside


@pytest.mark.parametrize("module", mostly_long([speculate, search, rates], every=3))
def test_tables_are_written_on_an_emulated_gpu(module: ModuleType, tmp_path: Path) -> None:
    assert module.main(["--tiny", "--out", str(tmp_path / "table.md")]) == 0
    rows = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) >= 4
