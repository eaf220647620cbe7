"""The table of GGUF formats: what its ratios are taken to, and that a format is measured once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.process import BenchError
from benchmarks.engine.workloads import Stopwatch, run, warm_up
from benchmarks.gguf import formats
from benchmarks.gguf.formats import compare, main, markdown

_MACHINE = {"processor": "AMD", "cores": 2, "threads": 2, "python": "3.11", "versions": {"torch": "2"}}


def _told(**speeds: list[float]) -> dict[str, Any]:
    names = {"llama": "llama.cpp", "openvino": "openvino-genai"}
    runs = {"W1 model": {names.get(name, name): values for name, values in speeds.items()}}
    return {"machine": _MACHINE, "runs": runs, "left_out": [{"peer": "vllm", "stage": "", "reason": "away"}]}


def test_a_ratio_is_that_of_medians_to_the_faster_peer_and_the_least_is_quoted_beside_the_largest() -> None:
    results = {
        "size": "50M",
        "rounds": 3,
        "cases": ["W1"],
        "formats": {
            "Q4_0": _told(ours=[8.0, 9.0, 1.0], llama=[2.0, 2.0, 5.0], openvino=[1.0]),
            "Q8_0": _told(ours=[8.0], llama=[4.0], openvino=[5.0]),
            "MXFP4": _told(ours=[8.0]),
        },
    }
    assert [(row["format"], row["ratio"]) for row in compare(results)] == [
        ("Q4_0", 4.0),
        ("Q8_0", 1.6),
        ("MXFP4", None),
    ]
    page = markdown(results, "command")
    assert "| Q4_0 | W1 | 8.0 | 2.0 | 1.0 | 4.00 |" in page
    assert "| W1 | 1.60 | Q8_0 | 4.00 | Q4_0 | 4: missed |" in page
    assert "MXFP4: vllm is left out: away" in page


def test_a_format_that_is_in_the_results_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make_file(_size: str, name: str, _python: str) -> Path:
        made.append(name)
        raise BenchError("no quantizer")

    monkeypatch.setattr(formats, "make_file", make_file)
    before = {"size": "50M", "rounds": 3, "cases": ["W1"], "formats": {"Q4_0": _told(ours=[1.0])}}
    (tmp_path / "results.json").write_text(json.dumps(before))
    asked = ["--size", "50M", "--rounds", "3", "--case", "W1", "--peer-python", "python", "--out", str(tmp_path)]
    assert (main(["--format", "Q4_0", "Q8_0", *asked]), made) == (1, ["Q8_0"])


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [("--size", "250M", "size: 50M there, 250M asked"), ("--rounds", "2", "rounds: 3 there")],
)
def test_a_folder_of_another_run_is_refused_and_left_as_it_is(
    option: str, value: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.dumps({"size": "50M", "rounds": 3, "cases": ["W1"], "formats": {}})
    (tmp_path / "results.json").write_text(before)
    asked = {"--size": "50M", "--rounds": "3", "--case": "W1", "--peer-python": "python", "--out": str(tmp_path)}
    assert main([word for pair in (asked | {option: value}).items() for word in pair]) == 2
    assert told in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == before


def test_a_case_that_a_program_times_itself_is_neither_timed_nor_warmed_up_here() -> None:
    class Program:
        def time_case(self, case: str) -> dict[str, float] | None:
            return {"tokens": 6.0, "seconds": 2.0} if case == "W4" else None

        def session(self, *, seed: int, greedy: bool = False) -> Any:
            raise LookupError(f"session {seed} {greedy}")

    program = Program()
    assert isinstance(program, Stopwatch)
    assert run("W4", program, 1) == {"tokens": 6.0, "seconds": 2.0}
    assert warm_up("W4", program) == {}
    with pytest.raises(LookupError):
        run("W2", program, 1)
