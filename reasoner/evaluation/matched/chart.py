"""Picture of a matched evaluation: accuracy against the spent amount, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasoner.evaluation.chart import COLOURS, GREY, MARKERS, label_lines, set_token_ticks
from reasoner.evaluation.matched.page import AXES
from reasoner.evaluation.matched.plan import Quantity
from reasoner.evaluation.matched.results import MatchedRow
from reasoner.evaluation.plan import CEILING, GREEDY


def draw_pareto(rows: Sequence[MatchedRow], quantity: Quantity, title: str, path: Path) -> None:
    """Write a PNG: a line for each strategy with 95 % intervals, and a grey band along the Pareto front."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    lines: dict[str, list[MatchedRow]] = {}
    for row in rows:
        lines.setdefault(row.strategy, []).append(row)
    figure, panel = pyplot.subplots(figsize=(9.0, 5.6), layout="constrained")
    front = sorted((row.spent, row.accuracy) for row in rows if row.is_on_front)
    if len(front) > 1:
        panel.plot(
            *zip(*front, strict=True), drawstyle="steps-post", color=GREY, lw=7, alpha=0.22, solid_capstyle="round"
        )
    ends, index = [], 0
    for name, points in lines.items():
        spent, values = [row.spent for row in points], [row.accuracy for row in points]
        if name == CEILING:
            panel.plot(spent, values, color=GREY, linestyle="dotted", lw=1.4)
            ends.append((spent[-1], values[-1], "pass@budget, the ceiling", GREY))
            continue
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        if name == GREEDY:
            colour, marker = "#000000", "*"
        else:
            index += 1
        errors = [[row.accuracy - row.low for row in points], [row.high - row.accuracy for row in points]]
        looks: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "ms": 6.0,
            "lw": 1.4,
            "elinewidth": 0.8,
            "capsize": 2.0,
        }
        panel.errorbar(spent, values, yerr=errors, **looks)
        ends.append((spent[-1], values[-1], name, colour))
    panel.set_xscale("log")
    panel.set_ylim(0, 1.02)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.set_xlabel(f"{AXES[quantity]} (spent, of budgets that are equal)")
    panel.set_ylabel("problems solved")
    panel.grid(alpha=0.25, which="both", linewidth=0.5)
    panel.spines[["top", "right"]].set_visible(False)
    lowest, highest = panel.get_xlim()
    panel.set_xlim(lowest, highest * (highest / lowest) ** 0.34)  # room for the names
    set_token_ticks(panel)
    label_lines(panel, ends, highest)
    figure.suptitle(f"{title}; the band is the Pareto front", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
