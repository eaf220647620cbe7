"""The files that an evaluation writes into its folder: ``results.json``, ``table.md`` and ``chart.png``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reasoner.evaluation.chart import draw_results
from reasoner.evaluation.comparisons import Results, StrategyComparison, TokenSaving
from reasoner.evaluation.statistics import Row

ROW_HEADINGS = (
    "strategy", "N", "accuracy", "95 % interval", "strict", "flexible", "reached", "samples", "tokens",
    "thought", "verifier", "MFLOPs", "seconds",
)  # fmt: skip
COMPARISON_HEADINGS = ("strategy", "N", "over", "difference", "95 % interval", "cost")
SAVING_HEADINGS = ("strategy", "N", "times its tokens", "95 % interval")


def write(folder: Path, results: Results, document: dict[str, Any], command: str) -> None:
    """Write the three files. ``document`` is the output of ``--json``."""
    (folder / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    rows, settings = results.rows(), document["settings"]
    conditions = ", ".join(
        f"{name} {' '.join(str(value).split())}" for name, value in settings.items() if value not in (None, "", [])
    )
    title = (
        f"{document['suite']}: {document['problems']} problems, {settings['seeds']} seed{'s' * (settings['seeds'] > 1)}"
    )
    parts = [
        f"    {command}",
        f"{title}; {conditions}. Tokens, FLOPs and seconds are means of one problem; tokens include thoughts and the "
        "verifier's. Accuracy is over problems and seeds, its interval is Wilson's for the trials that the spread "
        "between problems is worth. *Strict* is the accuracy if only answers count that the solution states, "
        "*flexible* the share of problems whose answer is the last number or choice letter instead. *Reached* is the "
        "accuracy if the suite's rule chose among the candidates.",
        _format_markdown(ROW_HEADINGS, row_cells(rows)),
        "The same problems on both sides; intervals from a bootstrap over problems. *Cost* is ours over theirs, in "
        "tokens (FLOPs where models differ).",
        _format_markdown(COMPARISON_HEADINGS, comparison_cells(results.comparisons())),
        "How many times the strategy's tokens majority needs for the same accuracy (interpolated; > where majority "
        "never gets there).",
        _format_markdown(SAVING_HEADINGS, saving_cells(results.savings())),
    ]
    parts += [f"Left out: {item['problem']} ({item['error']})" for item in document["left_out"]]
    (folder / "table.md").write_text("\n\n".join(parts) + "\n")
    draw_results(rows, {case.label for case in results.plan.pooled}, title, folder / "chart.png")


def row_cells(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row.strategy if row.model == rows[0].model else f"{row.strategy} of {row.model}",
            str(row.n),
            f"{row.accuracy:.3f}",
            f"{row.low:.3f} – {row.high:.3f}",
            f"{row.accuracy_strict:.3f}",
            f"{row.flexible:.3f}",
            f"{row.reached:.3f}",
            f"{row.samples:.1f}",
            f"{row.tokens + row.verifier_tokens:.0f}",
            f"{row.thought_tokens:.0f}",
            f"{row.verifier_tokens:.0f}",
            f"{row.flops / 1e6:.4g}",
            f"{row.seconds:.2f}",
        ]
        for row in rows
    ]


def comparison_cells(comparisons: Iterable[StrategyComparison]) -> list[list[str]]:
    return [
        [
            item.strategy,
            str(item.n or "–"),
            ", ".join(filter(None, (item.over, item.what, item.note))),
            f"{item.difference:+.3f}",
            f"{item.low:+.3f} – {item.high:+.3f}",
            f"{item.cost:.2f}",
        ]
        for item in comparisons
    ]


def saving_cells(savings: Iterable[TokenSaving]) -> list[list[str]]:
    return [
        [item.strategy, str(item.n), f"{'> ' * item.bound}{item.times:.2f}", f"{item.low:.2f} – {item.high:.2f}"]
        for item in savings
    ]


def _format_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(headings) - 1), *lines[1:]])
