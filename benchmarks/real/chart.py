"""Chart of the measurement: a panel for each task, accuracy against tokens, greedy decoding as a line across."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from reasoner.evaluation.chart import COLOURS, GREY, MARKERS
from reasoner.evaluation.plan import CEILING, GREEDY, MAJORITY
from reasoner.evaluation.statistics import Row

COLUMNS = 3


def draw_tasks(tasks: Sequence[tuple[str, Sequence[Row]]], path: Path) -> None:
    """Write a PNG. Bars are 95 % intervals; tokens include the verifier's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    names = list(dict.fromkeys(row.strategy for _, rows in tasks for row in rows))
    styled = [name for name in names if name not in (GREEDY, CEILING, MAJORITY)]
    columns = min(COLUMNS, max(1, len(tasks)))
    height = -(-len(tasks) // columns) or 1
    figure, axes = pyplot.subplots(
        height, columns, figsize=(4.4 * columns, 3.4 * height + 0.6), squeeze=False, layout="constrained"
    )
    lines = {}
    for panel, (task, rows) in zip(axes.flat, tasks, strict=False):
        for name in names:
            line = sorted((row for row in rows if row.strategy == name), key=lambda row: row.n)
            if not line:
                continue
            if name == GREEDY:
                lines[name] = panel.axhline(line[0].accuracy, color="black", linestyle="--", lw=1.2)
                panel.axhspan(line[0].low, line[0].high, color="black", alpha=0.06, lw=0)
                continue
            index = styled.index(name) if name in styled else 0
            plain = name in (CEILING, MAJORITY)
            errors = [[row.accuracy - row.low for row in line], [row.high - row.accuracy for row in line]]
            lines[name] = panel.errorbar(
                [row.tokens + row.verifier_tokens for row in line],
                [row.accuracy for row in line],
                yerr=None if name == CEILING else errors,
                color=GREY if plain else COLOURS[index % len(COLOURS)],
                linestyle=":" if name == CEILING else "-",
                marker="" if name == CEILING else "o" if plain else MARKERS[index % len(MARKERS)],
                ms=4,
                lw=1.3,
                elinewidth=0.7,
                capsize=2,
            )
        panel.set_xscale("log")
        panel.set_ylim(0, 1.02)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.set_title(re.split("[?&]shots=", task)[0], fontsize=8.5)
        panel.grid(alpha=0.25, which="major", linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(axes.flat)[len(tasks) :]:
        panel.set_visible(False)
    for panel in list(axes.flat)[max(0, len(tasks) - columns) : len(tasks)]:
        panel.set_xlabel("tokens a problem, generated and verifier", fontsize=8)
    figure.supylabel("problems solved", fontsize=9)
    labels = {CEILING: "pass@N, the ceiling", MAJORITY: "self_consistency (majority)"}
    figure.legend(
        list(lines.values()),
        [labels.get(name, name) for name in lines],
        loc="outside lower center",
        ncols=len(lines),
        fontsize=8,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
