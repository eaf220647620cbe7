"""The files of a matched evaluation: ``results.json``, ``table.md``, ``chart.png`` and ``report.html``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reasoner.evaluation.matched.chart import draw_pareto
from reasoner.evaluation.matched.page import write_page
from reasoner.evaluation.matched.results import CurvePoint, MatchedComparison, MatchedResults, MatchedRow
from reasoner.evaluation.plan import CEILING
from reasoner.evaluation.statistics import Estimate

Cells = list[list[str]]
INTERVAL = "95 % interval"
HEADINGS = ("Strategies at each budget", "Differences", "Choices among the samples of one pool")

ROW_NOTE = (
    "*Spent* is the mean of a problem, *of it* the share of the budget; a ★ marks the Pareto front: nothing else "
    "solves as many for less. *N* is the number of samples that the budget pays for, of searches their n. *Reached* "
    "is the accuracy if the suite's rule chose among the candidates, and the *gap* is what the strategy's own choice "
    "loses to that. Intervals are 95 %: of accuracies Wilson's for the trials that the spread between problems is "
    "worth, of gaps a bootstrap's over problems."
)
COMPARISON_NOTE = (
    "The same problems and seeds on both sides; intervals from a bootstrap over problems, p from flipping the signs of "
    "the problems' differences. *Cost* is what the strategy spent over what the other one did."
)
CURVE_NOTE = (
    "Choices among k samples of the pool: pass@k is the unbiased estimate of Chen et al. 2021, the others are means "
    "over subsets. The *gap* is pass@k less the accuracy."
)


def write(folder: Path, results: MatchedResults, document: dict[str, Any], command: str) -> None:
    """Write the files. ``document`` is the output of ``--json``."""
    (folder / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    title, conditions = describe_run(document)
    tables = list(
        zip(HEADINGS, (ROW_NOTE, COMPARISON_NOTE, CURVE_NOTE), *zip(*list_tables(results), strict=True), strict=True)
    )
    parts = [f"    {command}", f"{title}; {conditions}."]
    for _, note, headings, rows in tables:
        parts += [note, _format_markdown(headings, rows)]
    parts += [f"Left out: {item['problem']} ({item['error']})" for item in document["left_out"]]
    (folder / "table.md").write_text("\n\n".join(parts) + "\n")
    draw_pareto(results.rows(), results.plan.quantity, title, folder / "chart.png")
    write_page(
        folder / "report.html",
        results,
        [(heading, note.replace("*", ""), headings, rows) for heading, note, headings, rows in tables],
        title=title,
        conditions=conditions,
        command=command,
        origin={name: value for name, value in document["origin"].items() if name != "command"},
        left_out=document["left_out"],
    )


def describe_run(document: dict[str, Any]) -> tuple[str, str]:
    """Return a title, and the conditions of a run."""
    settings = document["settings"]
    conditions = ", ".join(
        f"{name} {' '.join(str(value).split())}" for name, value in settings.items() if value not in (None, "", [])
    )
    seeds = f"{settings['seeds']} seed{'s' * (settings['seeds'] > 1)}"
    return f"{document['suite']} at equal {document['matched']}: {document['problems']} problems, {seeds}", conditions


def list_tables(results: MatchedResults) -> Iterator[tuple[tuple[str, ...], Cells]]:
    """Yield headings and cells of the tables: rows, comparisons, and the curves of the pool."""
    start = ("strategy", f"budget, {results.plan.quantity}")
    heads: tuple[str, ...] = (*start, "N", "accuracy", INTERVAL, "spent", "of it", "reached", "gap", INTERVAL, "")
    yield heads, [_list_row_cells(row, results) for row in results.rows()]
    heads = (*start, "over", "difference", INTERVAL, "p", "cost")
    yield heads, [_list_comparison_cells(item, results) for item in results.comparisons()]
    curves = results.curves()
    ks = sorted({point.k for point in curves})
    by_name: dict[str, dict[int, CurvePoint]] = {}
    for point in curves:
        by_name.setdefault(point.strategy, {})[point.k] = point
    last = ks[-1] if ks else 0
    yield (
        ("choice", *(f"k = {k}" for k in ks), f"gap at {last}", INTERVAL),
        [_list_curve_cells(name, points, ks) for name, points in by_name.items()],
    )


def format_interval(low: float, high: float, form: str = ".3f") -> str:
    """Return an interval for a table."""
    return f"{low:{form}} – {high:{form}}"


def _list_row_cells(row: MatchedRow, results: MatchedResults) -> list[str]:
    write_amount = results.plan.quantity.write_amount
    is_ceiling = row.strategy == CEILING
    name = f"{row.strategy}, the ceiling" if is_ceiling else row.strategy
    return [
        name,
        "–" if row.budget is None else write_amount(row.budget),
        str(row.n),
        f"{row.accuracy:.3f}",
        format_interval(row.low, row.high),
        write_amount(row.spent),
        "–" if row.budget is None else f"{row.spent / row.budget:.0%}",
        f"{row.reached:.3f}",
        "–" if is_ceiling else f"{row.gap.value:.3f}",
        "–" if is_ceiling else format_interval(row.gap.low, row.gap.high),
        "★" * row.is_on_front,
    ]


def _list_comparison_cells(item: MatchedComparison, results: MatchedResults) -> list[str]:
    return [
        item.strategy,
        results.plan.quantity.write_amount(item.budget),
        item.over,
        f"{item.difference:+.3f}",
        format_interval(item.low, item.high, "+.3f"),
        f"{item.p_value:.3f}" if item.p_value >= 0.001 else "< 0.001",
        f"{item.cost:.2f}",
    ]


def _list_curve_cells(name: str, points: dict[int, CurvePoint], ks: Sequence[int]) -> list[str]:
    gap: Estimate = points[ks[-1]].gap
    has_gap = name != "pass@k"
    return [
        name,
        *(f"{points[k].accuracy:.3f}" for k in ks),
        f"{gap.value:.3f}" if has_gap else "–",
        format_interval(gap.low, gap.high) if has_gap else "–",
    ]


def _format_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(headings) - 1), *lines[1:]])
