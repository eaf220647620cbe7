"""Picture of a search tree: colour is the verifier's score, dashed is pruned, bold is the chosen path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LONGEST_LABEL = 26
COLUMN, ROW = 2.6, 0.34
"""Width of a level and height of a leaf in inches."""


def draw_tree(nodes: Sequence[Mapping[str, Any]], best: str | None, title: str, path: Path) -> None:
    """Write a PNG of the tree that ``GET /v1/jobs/{id}/tree`` returns, with levels from left to right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    rows = _rows(nodes)
    depth = max((len(node["id"].split(".")) for node in nodes), default=1)
    leaves = max(rows.values(), default=0.0) + 1
    figure, axes = pyplot.subplots(figsize=(1 + COLUMN * depth, 1.2 + ROW * leaves), layout="constrained")
    colours, scale = colormaps["viridis"], Normalize(0, 1)
    for node in nodes:
        x, y = len(node["id"].split(".")) * COLUMN, -rows[node["id"]]
        parent = node["parent"]
        chosen = best is not None and (best == node["id"] or best.startswith(node["id"] + "."))
        pruned = node["state"] == "pruned"
        axes.plot(
            [x - COLUMN, x],
            [-rows[parent] if parent else -(leaves - 1) / 2, y],
            linestyle="--" if pruned else "-",
            linewidth=2.5 if chosen else 0.8,
            color="#D55E00" if chosen else "#999999",
            zorder=1,
        )
        colour = "#dddddd" if node["score"] is None else colours(scale(node["score"]))
        axes.scatter([x], [y], s=70, color=[colour], edgecolors="#D55E00" if chosen else "#555555", zorder=2)
        weight, shade = ("bold", "#000000") if chosen else ("normal", "#888888" if pruned else "#333333")
        # Model text is data: a dollar sign must not start a formula.
        text = axes.text(x + 0.11, y, _label(node), fontsize=6.5, weight=weight, color=shade, va="center", zorder=3)
        text.set_parse_math(False)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})
    axes.scatter([0], [-(leaves - 1) / 2], s=90, color="#000000", zorder=2)
    axes.set_xlim(-0.2, (depth + 1) * COLUMN)
    axes.set_title(title, fontsize=9).set_parse_math(False)
    axes.set_axis_off()
    bar = figure.colorbar(ScalarMappable(scale, colours), ax=axes, shrink=0.5, pad=0.01)
    bar.set_label("verifier's score", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _rows(nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the row of each node: leaves one below the other, a parent in the middle of its children."""
    children: dict[str, list[str]] = {}
    for node in sorted(nodes, key=lambda node: [int(part) for part in node["id"].split(".")]):
        children.setdefault(node["parent"], []).append(node["id"])
    rows: dict[str, float] = {}

    def assign_rows(name: str, free: float) -> float:
        below = children.get(name, [])
        if not below:
            rows[name] = free
            return free + 1
        for child in below:
            free = assign_rows(child, free)
        rows[name] = (rows[below[0]] + rows[below[-1]]) / 2
        return free

    free = 0.0
    for child in children.get("", []):
        free = assign_rows(child, free)
    return rows


def _label(node: Mapping[str, Any]) -> str:
    text = " ".join(node["text"].split())
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"
