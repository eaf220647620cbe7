"""Kernel benchmark without a GPU: every case computes the expected result, and a wrong result is an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernels import __main__ as command
from benchmarks.kernels import attention, dry_run, linear, measure, norm
from benchmarks.kernels.measure import Case, Runs, WrongResultError, check, documents, markdown
from tests.seeds import shift


@pytest.mark.parametrize("suite", dry_run.SUITES)
def test_every_case_computes_the_expected_result(suite: str) -> None:
    torch.manual_seed(shift(0))
    cases = list(dry_run.SUITES[suite]())
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        check(case.name, case.build(torch.device("cpu")))
        assert case.moved > 0


def test_bytes_are_counted_once_read_and_once_written() -> None:
    """The sum and its norm read two matrices and write two; int4 has 4 bits per weight, and a scale and a zero for 128
    of them.
    """
    assert next(norm.cases((10,), 64)).moved == 4 * 2 * 10 * 64
    assert next(linear.cases((1,), ((256, 128),))).moved == 256 * 128 // 2 + 2 * 128 * 3 + 2 * (256 + 128)


def test_shared_keys_are_counted_once() -> None:
    """Keys of 8 bits have half the bytes, and a scale of 4 bytes each."""
    moved = {case.name: case.moved for case in attention.cases((1, 2), (96, 160), 48)}
    of_queries = 2 * 2 * 32 * 128 * 2
    assert moved["decode, bfloat16, 2 × 160"] == 2 * 160 * 2 * 8 * 128 * 2 + of_queries
    assert moved["decode, int8, 2 × 160"] == 2 * 160 * 2 * 8 * (128 + 4) + of_queries
    assert moved["2 branches of a prefix of 160"] == (160 + 2 * 64) * 2 * 8 * 128 * 2 + of_queries


def test_a_wrong_result_is_not_timed() -> None:
    one, two = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 1.2])
    check("right", Runs(lambda: one, {"peer": lambda: one}, lambda: one, 0.01))
    with pytest.raises(WrongResultError, match=r"case: the result of ours is off by 0\.2"):
        check("case", Runs(lambda: two, {}, lambda: one, 0.01))
    with pytest.raises(WrongResultError, match="result of peer"):
        check("case", Runs(lambda: one, {"peer": lambda: two}, lambda: one, 0.01))
    with pytest.raises(WrongResultError):
        check("case", Runs(lambda: one * torch.nan, {}, lambda: one, 0.01))


def test_the_table_has_a_line_for_each_row() -> None:
    row = {"case": "a", "metric": "time", "unit": "µs", "ours": 2.0, "peer": "torch", "peer_value": 5.0, "ratio": 2.5}
    machine = {"gpu": "G", "clocks": "1 MHz, 2 MHz", "copy_gb_s": 4300.0, "torch": "2", "rounds": 5}
    table = markdown({"machine": machine, "rows": [row], "failed": {"b": "OutOfMemoryError: too large\nmore"}})
    assert "| a | time | 2 µs | torch | 5 µs | 2.50 |" in table
    assert table.endswith("b: OutOfMemoryError: too large\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_reports_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.kernels"])
    assert command.main() == 1
    assert "no CUDA device" in capsys.readouterr().err


def on_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mock a small GPU whose every call takes a millisecond."""
    about = SimpleNamespace(name="G", multi_processor_count=2, L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(measure, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(measure, "matrix_rate", lambda device, numbers: 2e9)
    monkeypatch.setattr(measure, "_captured", lambda runs: (None, len(runs)))
    monkeypatch.setattr(measure, "_seconds", lambda graph, calls: 1e-3)


def test_a_case_is_timed_beside_a_copy_and_the_peak_and_a_failing_case_does_not_stop_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_small_machine(monkeypatch)
    one, two = torch.ones(4), torch.full((4,), 2.0)
    right = Runs(lambda: one, {"torch": lambda: one}, lambda: one, 0.01)
    wrong = Runs(lambda: two, {}, lambda: one, 0.01)
    given = [Case("wrong", 10, lambda device: wrong), Case("right", 500_000, lambda device: right, 1e6)]
    heard: list[str] = []
    first, last = documents(given, rounds=1, progress=heard.append)
    assert first["rows"] == []
    assert last["failed"] == {"wrong": "WrongResultError: wrong: the result of ours is off by 1 of the largest number"}
    found = [(row["metric"], row["ours"], row["peer"], row["peer_value"], row["ratio"]) for row in last["rows"]]
    assert found == [
        ("time", 1e3, "torch", 1e3, 1.0),
        ("bandwidth", 0.5, "copy", 1.0, 0.5),
        ("products", 1e-3, "peak", 2e-3, 0.5),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_case_is_timed_on_a_gpu() -> None:
    given = [next(norm.cases((16,), 4096)), next(linear.cases((16,), ((4096, 4096),)))]
    *_, result = documents(given, rounds=1, progress=lambda name: None)
    assert not result["failed"]
    peers = ["torch", "torch.compile", "copy", "bfloat16", "copy", "peak"]
    assert [row["peer"] for row in result["rows"]] == peers
    assert all(row["ours"] > 0 and row["ratio"] > 0 for row in result["rows"])
