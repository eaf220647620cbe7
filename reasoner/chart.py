"""The picture of an evaluation: accuracy against total tokens, one line for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reasoner.statistics import Row

# Okabe and Ito's colours: distinguishable with any kind of colour vision.
COLOURS = {
    "greedy": "#000000",
    "self_consistency": "#E69F00",
    "best_of_n": "#56B4E9",
    "weighted_vote": "#009E73",
    "beam": "#D55E00",
    "beam+rule": "#CC79A7",
    "pass@n": "#777777",
}


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes a PNG. Tokens include the verifier's; the bands are 95 % intervals; rule-checked lines are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter, ScalarFormatter

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(row.strategy for row in rows):
        line = sorted((row for row in rows if row.strategy == name), key=lambda row: row.n)
        tokens = [row.tokens + row.verifier_tokens for row in line]
        checked = name in ("pass@n", "beam+rule")
        label = {"pass@n": "sampling + rule (pass@N)", "beam+rule": "beam + rule"}.get(name, name)
        axes.plot(
            tokens,
            [row.accuracy for row in line],
            "--o" if checked else "-o",
            color=COLOURS.get(name, "#0072B2"),
            label=label,
        )
        axes.fill_between(
            tokens, [row.low for row in line], [row.high for row in line], color=COLOURS.get(name, "#0072B2"), alpha=0.1
        )
        for x, row in zip(tokens, line, strict=True):
            axes.annotate(str(row.n), (x, row.accuracy), textcoords="offset points", xytext=(4, 5), fontsize=7)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1)
    axes.set_xlabel("tokens a problem, generated and verifier (the small numbers are N)")
    axes.set_ylabel("problems solved")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
