"""The measurement of FlashInfer's attention, at tiny sizes on a stand-in for the package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import flashinfer_times as command
from engine.attention import cuda_flashinfer
from engine.attention.flashinfer_times import FILE, StepTime, StepTimes, read_times
from tests.engine.attention import fake_flashinfer


@pytest.fixture(autouse=True)
def the_package_is_forgotten() -> Iterator[None]:
    yield
    cuda_flashinfer.load_flashinfer.cache_clear()


def test_a_run_measures_only_the_steps_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(command, "_CALLS", 5)
    path, before = tmp_path / "steps.json", FILE.read_text()
    arguments = ["--dry-run", "--rounds", "1", "--out", str(path)]
    assert command.main(arguments) == 0
    steps = json.loads(path.read_text())
    assert [(step["rows"], step["tokens"], step["keys"]) for step in steps] == [(2, 2, 80), (2, 31, 90)]
    assert all(min(step["triton_us"], step["flashinfer_us"]) > 0 for step in steps)
    path.write_text(json.dumps(steps[:-1]))
    assert command.main(arguments) == 0
    again = json.loads(path.read_text())
    assert again[:-1] == steps[:-1]
    assert len(again) == len(steps)
    assert capsys.readouterr().out.count("| prefill | 2 | 31 | 90 |") == 2
    assert FILE.read_text() == before


def test_nothing_is_measured_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_flashinfer, "find_spec", lambda _: None)
    assert command.main(["--out", str(tmp_path / "steps.json")]) == 0
    assert capsys.readouterr().out.startswith("skipped: ")
    assert not [*tmp_path.iterdir()]


def test_the_steps_differ_and_their_keys_fit() -> None:
    sizes = [shape.size for shape in command.SHAPES]
    assert len(set(sizes)) == len(sizes)
    assert max(keys for _, _, keys in sizes) <= command._MAX_KEYS


def test_an_entry_is_added_beside_the_others_and_replaced(tmp_path: Path) -> None:
    path, old, new = tmp_path / "times.json", StepTime(1, 1, 9, 2.0, 1.0), StepTime(1, 8, 9, 2.0, 1.0)
    path.write_text("{}")
    for name, step in (("B", old), ("A", old), ("B", new)):
        command.write_entry(path, name, [step], "a test")
    assert read_times(path) == {"A": StepTimes((old,), "a test"), "B": StepTimes((new,), "a test")}
