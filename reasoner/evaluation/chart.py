"""Chart of an evaluation: accuracy against total tokens, one line per strategy.

Two panels share their axes: choices among the samples of a pool, and live searches. Greedy decoding, majority voting
and the ceiling, pass@N, are in both as references. Labels stand at the ends of lines; colours suit all kinds of colour
vision, and markers and dashes distinguish lines in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from reasoner.evaluation.plan import CEILING, GREEDY, MAJORITY
from reasoner.evaluation.statistics import Row

# Okabe and Ito's colours except yellow, which is illegible in print, and black, which is for greedy decoding.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
MARKERS = "osD^vP*X<>"
GREY = "#777777"
MAX_TICKS = 7
"""Maximum number of labelled ticks of an axis of tokens."""
GAP = 0.032
"""Minimum distance between two labels as a fraction of the panel's height."""


def draw_results(rows: Sequence[Row], pooled: Collection[str], title: str, path: Path) -> None:
    """Write a PNG. Tokens include the verifier's, bars are 95 % intervals, ``pooled`` strategies are on the left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    main = rows[0].model
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.n):
        lines.setdefault(row.strategy if row.model == main else f"{row.strategy}, {row.model}", []).append(row)
    shared = [name for name in lines if name in (CEILING, MAJORITY) or name.startswith(GREEDY)]
    panels = [
        ("one pool of samples", [name for name in lines if name in pooled and name not in shared]),
        ("searches", [name for name in lines if name not in pooled and name not in shared]),
    ]
    panels = [(heading, [*shared, *names]) for heading, names in panels if names or len(panels) == 1] or [("", shared)]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.6 * len(panels), 5.6), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (heading, names) in zip(axes[0], panels, strict=True):
        ends = []
        for index, name in enumerate(names):
            end = _draw_line(panel, name, lines[name], max(0, index - len(shared)))
            if name.startswith(GREEDY):  # no other label is near it
                panel.annotate(name, end[:2], (6, 5), textcoords="offset points", fontsize=7.5)
            else:
                ends.append(end)
        panel.set_xscale("log")
        panel.set_ylim(0, 1.02)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.set_xlabel("tokens a problem, generated and verifier")
        panel.set_title(heading, fontsize=10)
        panel.grid(alpha=0.25, which="both", linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
        panel.ends = ends
    lowest, highest = axes[0][0].get_xlim()
    for panel in axes[0]:
        panel.set_xlim(lowest, highest * (highest / lowest) ** 0.42)  # room for the names
        set_token_ticks(panel)
        label_lines(panel, panel.ends, highest)
    axes[0][0].set_ylabel("problems solved")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def set_token_ticks(panel: Any) -> None:
    """Label a logarithmic axis of tokens at few round numbers: those between would overlap them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

    low, high = panel.get_xlim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for subs, step in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        ticks = [sub * 10.0**decade for decade in decades[::step] for sub in subs if low <= sub * 10.0**decade <= high]
        if len(ticks) <= MAX_TICKS:
            break
    if len(ticks) < 3:
        ticks = [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _shorten_number(value)))
    panel.xaxis.set_minor_formatter(NullFormatter())


def _shorten_number(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and size > 1e3):
            return f"{value / size:g}{unit}"
    return f"{value:,.10g}"


def _draw_line(panel: Any, name: str, line: Sequence[Row], index: int) -> tuple[float, float, str, str]:
    """Draw one line; return its end point, label and colour."""
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % 10]
    style = ("-", "--", ":")[index // len(COLOURS) % 3]
    if name == CEILING:
        colour, style, marker = GREY, "dotted", ""
    elif name == MAJORITY:
        colour, style, marker = GREY, "-", "o"
    elif name.startswith(GREEDY):
        colour, marker = "#000000", "*" if name == GREEDY else "P"
    tokens = [row.tokens + row.verifier_tokens for row in line]
    values = [row.accuracy for row in line]
    if name == CEILING:
        panel.fill_between(tokens, [row.low for row in line], [row.high for row in line], color=GREY, alpha=0.12, lw=0)
        panel.plot(tokens, values, linestyle=style, color=colour, lw=1.4)
    else:
        errors = [[row.accuracy - row.low for row in line], [row.high - row.accuracy for row in line]]
        looks: dict[str, Any] = {"color": colour, "linestyle": style, "marker": marker}
        panel.errorbar(tokens, values, yerr=errors, **looks, ms=5, lw=1.4, elinewidth=0.8, capsize=2)
    label = {CEILING: "pass@N, the ceiling", MAJORITY: "self_consistency (majority)"}.get(name, name)
    return tokens[-1], values[-1], label, colour


def label_lines(panel: Any, ends: Sequence[tuple[float, float, str, str]], right: float) -> None:
    """Write the labels beside the ends of their lines, spread vertically where they would overlap."""
    ends = sorted(ends, key=lambda end: end[1])
    heights: list[float] = []
    for _, y, _, _ in ends:
        heights.append(max(y, heights[-1] + GAP if heights else 0.01))
    limit = 1.0
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], limit)
        limit = heights[index] - GAP
    for (x, y, label, colour), height in zip(ends, heights, strict=True):
        arrow = {"arrowstyle": "-", "color": colour, "lw": 0.4, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3}
        panel.annotate(label, (x, y), (right * 1.02, height), color=colour, fontsize=7.5, va="center", arrowprops=arrow)
