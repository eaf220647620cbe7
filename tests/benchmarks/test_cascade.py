"""Fit of the costs of shared prefixes: constants behind simulated times, and the decisions for measured ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.gpu import cascade
from benchmarks.gpu.cascade import Timing, chooses_shared, fit_costs
from engine.attention.gpu_costs import read_costs
from tests.seeds import keep

H200 = Path(__file__).parents[2] / "benchmarks/results/gpu/NVIDIA-H200/kernels.partial.txt"
PREFIX_US, QUERY_US, RATES = 9.0, 0.2, {"bfloat16": 4000.0, "int8": 1600.0}
BYTES = {"bfloat16": 4096, "int8": 2112}


def simulate(noise: Callable[[], float]) -> list[Timing]:
    """Return times of a GPU with the constants above, each multiplied by ``1 + noise()``."""
    cells = []
    for dtype, rate in RATES.items():
        for branches in (4, 16, 64):
            for prefix in (64, 256, 512, 1024, 4096):
                own = 6.0 + branches / 10
                apart = own + branches * prefix * BYTES[dtype] / rate / 1e3
                shared = own + prefix * BYTES[dtype] / rate / 1e3 + PREFIX_US + QUERY_US * branches
                cells.append(
                    Timing(dtype, BYTES[dtype], branches, prefix, apart * (1 + noise()), shared * (1 + noise()))
                )
    return cells


def fitted(cells: list[Timing]) -> list[float]:
    costs = fit_costs(cells, multiprocessors=1, source="simulated")
    return [costs.prefix_us, costs.query_us, *(1e3 / costs.read_gb_s[name] for name in RATES)]


def test_the_fit_recovers_constants_from_times_without_noise() -> None:
    assert fitted(simulate(lambda: 0.0)) == pytest.approx(
        [PREFIX_US, QUERY_US, 0.25, 0.625], abs=5.1e-5
    )  # rounded to 4 decimals


def test_the_fit_is_unbiased_with_noise_of_two_percent() -> None:
    """Hotelling's test: the mean of many fits is the constants. p > 0.001, and each is within a few percent."""
    dice = np.random.default_rng(keep(0, "a statistical claim"))
    fits = np.array([fitted(simulate(lambda: dice.normal(0, 0.02))) for _ in range(100)])
    truth = np.array([PREFIX_US, QUERY_US, 0.25, 0.625])
    off = fits.mean(axis=0) - truth
    squared = len(fits) * off @ np.linalg.solve(np.cov(fits.T), off)
    count, size = fits.shape
    assert stats.f.sf(squared * (count - size) / (size * (count - 1)), size, count - size) > 0.001
    assert (fits.std(axis=0) < [0.5, 0.04, 0.01, 0.02]).all()


def test_a_cost_that_would_be_negative_is_zero() -> None:
    cells = [Timing("bfloat16", 4096, 8, prefix, 5 + prefix, 4 + prefix / 8) for prefix in (64, 256, 1024)]
    costs = fit_costs(cells, multiprocessors=1, source="")
    assert (costs.prefix_us, costs.query_us) == (0, 0)
    with pytest.raises(ValueError, match="do not grow"):
        fit_costs([Timing("int8", 1, 8, prefix, 5, 6 + prefix) for prefix in (64, 256)], multiprocessors=1, source="")


def h200_cells() -> list[Timing]:
    pattern = r"\| (\d+) branches of a prefix of (\d+) \| time \| (\S+) µs \| each for itself \| (\S+) µs \|"
    found = re.findall(pattern, H200.read_text())
    return [
        Timing("bfloat16", 4096, int(branches), int(prefix), float(apart), float(shared))
        for branches, prefix, shared, apart in found
    ]


def test_every_cell_that_was_measured_on_an_h200_is_decided_as_measured() -> None:
    cells, costs = h200_cells(), read_costs()["NVIDIA H200"]
    assert len(cells) == 14
    assert [chooses_shared(costs, cell) for cell in cells] == [cell.saved_us > 0 for cell in cells]


def test_the_entry_of_the_h200_is_the_fit_to_its_cells() -> None:
    entry = read_costs()["NVIDIA H200"]
    assert fit_costs(h200_cells(), multiprocessors=132, source=entry.source) == entry


def test_an_entry_is_added_beside_the_others_and_replaced(tmp_path: Path) -> None:
    path, entry = tmp_path / "costs.json", read_costs()["NVIDIA H200"]
    cascade.write_entry(path, "B", entry)
    cascade.write_entry(path, "A", entry)
    cascade.write_entry(path, "B", fit_costs(simulate(lambda: 0.0), multiprocessors=7, source="new"))
    assert list(read_costs(path)) == ["A", "B"]
    assert read_costs(path)["A"] == entry
    assert read_costs(path)["B"].multiprocessors == 7


def test_a_run_measures_only_the_cells_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cells.json"
    arguments = ["--dry-run", "--rounds", "1", "--out", str(path)]
    assert cascade.main(arguments) == 0
    cells = json.loads(path.read_text())
    assert len({(cell["dtype"], cell["branches"], cell["prefix"]) for cell in cells}) == len(cells) == 4 * 2 * 2
    path.write_text(json.dumps(cells[:-1]))
    assert cascade.main(arguments) == 0
    again = json.loads(path.read_text())
    assert again[:-1] == cells[:-1]
    assert len(again) == len(cells)
    assert capsys.readouterr().out.count("| uint8 | 3 | 48 |") == 2
