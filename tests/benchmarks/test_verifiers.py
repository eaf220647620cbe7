"""The tables of the verifiers' benchmark, from results written by hand, and the pairs of its position bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.verifiers.position import pair_solutions
from benchmarks.verifiers.report import interpolate, write_table


def row(strategy: str, n: int, accuracy: float, tokens: float) -> dict[str, Any]:
    means = {"tokens": tokens, "verifier_tokens": 0, "flops": 1e6, "reached": 0.9}
    return {"strategy": strategy, "n": n, "accuracy": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1, **means}


def test_the_curve_is_linear_in_the_logarithm_of_tokens_and_ends_at_its_last_point() -> None:
    curve = [row("best_of_n", 1, 0.2, 100), row("best_of_n", 4, 0.6, 10_000)]
    assert interpolate(curve, 1000) == "0.400"
    assert interpolate(curve, 100) == "0.200"
    assert interpolate(curve, 10_001) == "–"
    assert interpolate(curve, 99) == "–"


def test_every_table_has_its_rows(tmp_path: Path) -> None:
    searches = {
        "prm": [row("best_of_n", 16, 0.5, 1000), row("pass@n", 16, 0.6, 700), row("aggregate", 16, 0.3, 900)],
        "large": [row("best_of_n", 16, 0.51, 1000)],
        "mixed": [row("ab_mcts:variant=m", 16, 0.52, 1000), row("ab_mcts", 8, 0.99, 1)],
        "tournament": [row("tournament", 16, 0.53, 1000)],
        **{f"generative-{votes}": [row("best_of_n", 16, 0.54, 1000)] for votes in (1, 4, 16)},
    }
    for name, rows in searches.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({"rows": rows}))
    step = {"cases": 10, "error_accuracy": 0.5, "correct_accuracy": 0.6, "f1": 0.55}
    (tmp_path / "steps.json").write_text(json.dumps({"prm": step}))
    position = {"pairs": 9, "bias": 0.02, "first_order": 0.9, "second_order": 0.8, "both_orders": 0.95}
    (tmp_path / "position.json").write_text(json.dumps(position))
    text = write_table(tmp_path)
    assert (tmp_path / "table.md").read_text() == text + "\n"
    for expected in ("| generative, 1 vote | 16 | 0.540 |", "| generative, 4 votes |", "| tournament | 16 | 0.530 |"):
        assert expected in text
    assert "| policy, policy-large | ab_mcts:variant=m | 16 | 0.520 |" in text
    assert "0.990" not in text  # of another n
    assert "| prm | 10 | 0.500 | 0.600 | 0.550 |" in text
    assert "+0.020" in text


def test_a_pair_is_a_right_and_a_wrong_solution_of_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    cases = [("a", True, "x"), ("a", False, "y"), ("b", True, "z")]
    lines = [{"problem": p, "final_answer_correct": right, "steps": [s, s]} for p, right, s in cases]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert pair_solutions(path) == {"a": ("x\n\nx", "y\n\ny")}
