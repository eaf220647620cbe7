"""The page of results: what it takes from the files, and what it says is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.generate.results import create_results_page


def row(strategy: str, accuracy: float, n: int = 4, **more: Any) -> dict[str, Any]:
    told = {"strategy": strategy, "n": n, "accuracy": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1}
    return told | {"tokens": 30.0, "verifier_tokens": 12.0, "seconds": 1.5, "model": "policy"} | more


def write(folder: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    folder.mkdir(parents=True)
    document = {"suite": "countdown", "problems": 50, "rows": rows, "comparisons": [], "left_out": [], "settings": {}}
    (folder / "results.json").write_text(json.dumps(document | more))


def test_each_evaluation_has_its_rows_its_origin_and_a_line_of_the_overview(tmp_path: Path) -> None:
    origin = {"command": "reasoner eval countdown", "commit": "abc123", "date": "2026-11-30", "version": "0.2.0"}
    rows = [row("greedy", 0.2, n=1), row("best_of_n", 0.5), row("pass@n", 0.9), row("greedy", 0.8, n=1, model="large")]
    write(tmp_path / "one", rows, origin=origin | {"processor": "Some CPU", "cores": 2, "python": "3.11"})
    page = create_results_page(tmp_path)
    assert "| countdown | policy | 50 | 0.200 (0.100 – 0.300) | 0.500 (0.400 – 0.600) | `best_of_n` at 4 |" in page
    assert "[one](#countdown-policy-one)" in page
    assert "## countdown, policy: one" in page
    assert "    reasoner eval countdown" in page
    assert "Machine: Some CPU, 2 cores. Commit: abc123. Date: 2026-11-30." in page
    assert "| best_of_n | 4 | 0.500 | 0.400 – 0.600 | 42 | 12 | 1.50 |" in page
    assert "| greedy of large | 1 | 0.800 |" in page


def test_what_a_run_did_not_record_is_said_to_be_missing_and_its_failures_are_listed(tmp_path: Path) -> None:
    failed = [{"problem": "p7", "error": "too long"}]
    write(tmp_path / "old", [row("greedy", 0.2)], left_out=failed)
    page = create_results_page(tmp_path)
    assert "Machine: not recorded. Commit: not recorded. Date: not recorded." in page
    assert "Left out: p7 (too long)" in page


def test_comparisons_are_lost_only_where_the_whole_interval_is_below_zero(tmp_path: Path) -> None:
    lost = {"strategy": "beam", "n": 16, "over": "greedy", "difference": -0.2, "low": -0.3, "high": -0.1}
    open_ = lost | {"strategy": "mcts", "high": 0.01}
    write(tmp_path / "one", [row("greedy", 0.2)], comparisons=[lost, open_])
    page = create_results_page(tmp_path)
    assert "| countdown | policy | beam | 16 | greedy | -0.200 | -0.300 – -0.100 |" in page
    assert "| mcts |" not in page


def test_rows_of_equal_budgets_show_the_budget_and_what_was_spent(tmp_path: Path) -> None:
    write(tmp_path / "one", [row("beam", 0.4, budget=2000, spent=1234.5), row("greedy", 0.2, budget=None, spent=45)])
    page = create_results_page(tmp_path)
    assert "| beam | 2000 | 4 | 0.400 | 0.300 – 0.500 | 1234 |" in page
    assert "| greedy | – | 4 | 0.200 | 0.100 – 0.300 | 45 |" in page


def test_other_files_are_left_alone_and_a_file_of_several_tasks_has_a_section_for_each(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text(json.dumps({"rows": [1, 2]}))
    tasks = [{"task": name, "problems": 5, "rows": [row("greedy", 0.2)]} for name in ("aiw", "gcd")]
    lost = {"task": "gcd", "strategy": "auto at 16", "over": "best_of_n at 16", "difference": -0.1}
    document = {
        "command": "make it",
        "tasks": tasks,
        "all tasks": [],
        "differences": [lost | {"low": -0.2, "high": -0.05}],
    }
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "results.json").write_text(json.dumps(document))
    page = create_results_page(tmp_path)
    assert "## aiw, policy: real" in page
    assert "## gcd, policy: real" in page
    assert page.count("    make it") == 2
    assert "| gcd | policy | auto at 16 |  | best_of_n at 16 | -0.100 |" in page
