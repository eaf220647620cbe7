"""The report of a matched evaluation as one HTML page, which has its pictures and needs neither script nor network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from reasoner.evaluation.matched.figures import Figure, Point, Series
from reasoner.evaluation.matched.plan import Quantity
from reasoner.evaluation.matched.results import CurvePoint, MatchedResults, MatchedRow
from reasoner.evaluation.plan import CEILING

AXES = {
    Quantity.TOKENS: "tokens a problem, generated and verifier",
    Quantity.SECONDS: "seconds a problem",
    Quantity.FLOPS: "FLOPs a problem",
    Quantity.COST: "cost of a problem",
}
CEILING_NAME = "pass@budget, the ceiling"
Tables = Sequence[tuple[str, str, tuple[str, ...], list[list[str]]]]


def write_page(
    path: Path,
    results: MatchedResults,
    tables: Tables,
    *,
    title: str,
    conditions: str,
    command: str,
    origin: dict[str, Any],
    left_out: Sequence[dict[str, Any]],
) -> None:
    """Write the page. ``tables`` has heading, note, headings and cells of each; ``origin`` is ``describe_origin``'s."""
    pareto, curves = draw_pareto(results), draw_curves(results)
    page = _load_template().render(
        title=title,
        conditions=conditions,
        command=command,
        origin=origin,
        left_out=left_out,
        pareto=Markup(pareto.draw()),
        curves=Markup(curves.draw()),
        tables=tables,
    )
    path.write_text(page + "\n")


def draw_pareto(results: MatchedResults) -> Figure:
    """Return the picture of accuracy against the spent amount, with the front marked."""
    quantity, lines = results.plan.quantity, dict[str, list[MatchedRow]]()
    for row in results.rows():
        lines.setdefault(row.strategy, []).append(row)

    def describe(row: MatchedRow) -> str:
        of = "" if row.budget is None else f" of {quantity.write_amount(row.budget)}"
        spent = f"{quantity.write_amount(row.spent)}{of} {quantity}"
        return f"{row.strategy}: {row.accuracy:.1%} ({row.low:.1%} to {row.high:.1%}) for {spent}"

    return Figure(
        "Accuracy against what was spent",
        AXES[quantity],
        "problems solved",
        series=[
            Series(
                CEILING_NAME if name == CEILING else name,
                [Point(row.spent, row.accuracy, row.low, row.high, note=describe(row)) for row in rows],
                is_reference=name == CEILING,
            )
            for name, rows in lines.items()
        ],
        front=sorted({(row.spent, row.accuracy) for rows in lines.values() for row in rows if row.is_on_front}),
    )


def draw_curves(results: MatchedResults) -> Figure:
    """Return the picture of choices among k samples of the pool."""
    lines: dict[str, list[CurvePoint]] = {}
    for point in results.curves():
        lines.setdefault(point.strategy, []).append(point)
    return Figure(
        "Accuracy of choices among k samples",
        "k, samples of the pool",
        "problems solved",
        [
            Series(
                name,
                [
                    Point(
                        point.k,
                        point.accuracy,
                        point.low,
                        point.high,
                        note=f"{name}, k = {point.k}: {point.accuracy:.1%}",
                    )
                    for point in points
                ],
                is_reference=name == "pass@k",
            )
            for name, points in lines.items()
        ],
    )


@cache
def _load_template() -> jinja2.Template:
    source = Path(__file__).with_name("report.jinja").read_text()
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
