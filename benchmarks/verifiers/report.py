"""The tables of the verifiers' page, from the results of the evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_table(folder: Path) -> str:
    """Write ``table.md`` into the folder of results and return its text."""
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/results.json")}
    steps, position = (json.loads((folder / f"{name}.json").read_text()) for name in ("steps", "position"))
    text = "\n\n".join(
        [
            "**Which solution of n is right.** *Reached*: any of these n is right, which no choice can exceed; the "
            "samples of different runs differ. *PRM at its tokens*: best of n by the PRM, interpolated to the same "
            "number of tokens, the verifier's included (– beyond its largest n).",
            _verifiers(results),
            "**Tournaments** of the same model, beside best of n by its single scores.",
            _rows(_pick(results["tournament"], "tournament") + _pick(results["generative-1"], "best_of_n")),
            "**Merging**, beside a vote.",
            _rows(_pick(results["prm"], "aggregate", "synthesize", "self_consistency")),
            "**Several policies**: adaptive branching and best of n over both, and each alone; the PRM scores.",
            _several(results),
            "**The first wrong step** (ProcessBench's protocol, thresholds fitted on other problems).",
            _steps(steps),
            f"**Position bias** on {position['pairs']} pairs of a right and a wrong solution: the one that is shown "
            f"first gets {position['bias']:+.3f} more than one half. Right verdicts with the right one first "
            f"{position['first_order']:.3f}, second {position['second_order']:.3f}, by both orders "
            f"{position['both_orders']:.3f}.",
        ]
    )
    (folder / "table.md").write_text(text + "\n")
    return text


def _verifiers(results: dict[str, Any]) -> str:
    prm = _pick(results["prm"], "best_of_n")
    table = [("the rule (any of n is right)", row, "") for row in _pick(results["prm"], "pass@n")]
    table += [("PRM", row, "") for row in prm]
    for name in ("generative-1", "generative-4", "generative-16"):
        votes = name.rpartition("-")[2]
        label = f"generative, {votes} vote{'s' * (votes != '1')}"
        table += [(label, row, interpolate(prm, _tokens(row))) for row in _pick(results[name], "best_of_n")]
    cells = [[label, *_cells(row), at] for label, row, at in table]
    return _markdown(("verifier", "n", "accuracy", "95 % interval", "reached", "tokens", "PRM at its tokens"), cells)


def _several(results: dict[str, Any]) -> str:
    names = {"mixed": "policy, policy-large", "prm": "policy", "large": "policy-large"}
    cells = [
        [label, row["strategy"], *_cells(row), f"{row['flops'] / 1e6:.4g}"]
        for name, label in names.items()
        for row in _pick(results[name], "ab_mcts", "best_of_n")
        if row["n"] == 16
    ]
    return _markdown(("models", "strategy", "n", "accuracy", "95 % interval", "reached", "tokens", "MFLOPs"), cells)


def _steps(found: dict[str, Row]) -> str:
    cells = [
        [name, str(row["cases"]), f"{row['error_accuracy']:.3f}", f"{row['correct_accuracy']:.3f}", f"{row['f1']:.3f}"]
        for name, row in found.items()
    ]
    return _markdown(("verifier", "cases", "with an error", "without", "F1"), cells)


def _pick(result: dict[str, Any], *strategies: str) -> list[Row]:
    """Return the rows whose strategy begins with one of the names, in the order of the names."""
    return [row for name in strategies for row in result["rows"] if row["strategy"].split(":")[0] == name]


def _rows(rows: Iterable[Row]) -> str:
    return _markdown(
        ("strategy", "n", "accuracy", "95 % interval", "reached", "tokens"),
        [[row["strategy"], *_cells(row)] for row in rows],
    )


def _cells(row: Row) -> list[str]:
    interval = f"{row['low']:.3f} – {row['high']:.3f}"
    return [str(row["n"]), f"{row['accuracy']:.3f}", interval, f"{row['reached']:.3f}", f"{_tokens(row):.0f}"]


def _tokens(row: Row) -> float:
    return float(row["tokens"] + row["verifier_tokens"])


def interpolate(curve: Sequence[Row], tokens: float) -> str:
    """Return the accuracy of a curve at a number of tokens, linear in their logarithm."""
    points = sorted((math.log(_tokens(row)), row["accuracy"]) for row in curve)
    at = math.log(tokens)
    for (low, before), (high, after) in pairwise(points):
        if low <= at <= high:
            return f"{before + (after - before) * (at - low) / (high - low):.3f}"
    return "–"


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(headings) - 1), *lines[1:]])
