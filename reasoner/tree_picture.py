"""Picture of a search tree: colour is the verifier's score, dashed is pruned, bold is the chosen path.

A large tree is drawn as a summary: of many siblings the chosen one and the best, and one node for all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LONGEST_LABEL = 26
COLUMN, ROW = 2.6, 0.34
"""Width of a level and height of a leaf in inches."""
MAX_LEAVES = 24
"""Leaves that a picture shows."""
SIBLINGS = (16, 12, 8, 6, 4, 3, 2, 1)
"""Numbers of siblings that are drawn, from the first on that leaves few enough leaves."""
MAX_COLUMNS = 10
"""Levels that are drawn at their full width; those of a deeper tree are narrower."""


def draw_tree(nodes: Sequence[Mapping[str, Any]], best: str | None, title: str, path: Path) -> None:
    """Write a PNG of the tree that ``GET /v1/jobs/{id}/tree`` returns, with levels from left to right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    nodes = summarize(nodes, best)
    rows = _compute_rows(nodes)
    depth = max((len(node["id"].split(".")) for node in nodes), default=1)
    column = COLUMN * min(1.0, MAX_COLUMNS / depth)
    leaves = max(rows.values(), default=0.0) + 1
    figure, axes = pyplot.subplots(figsize=(1 + column * depth, 1.2 + ROW * leaves), layout="constrained")
    colours, scale = colormaps["viridis"], Normalize(0, 1)
    for node in nodes:
        x, y = len(node["id"].split(".")) * column, -rows[node["id"]]
        parent = node["parent"]
        chosen = best is not None and (best == node["id"] or best.startswith(node["id"] + "."))
        pruned = node["state"] == "pruned"
        axes.plot(
            [x - column, x],
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
        text = axes.text(
            x + 0.11,
            y,
            _label(node, int(LONGEST_LABEL * column / COLUMN)),
            fontsize=6.5,
            weight=weight,
            color=shade,
            va="center",
            zorder=3,
        )
        text.set_parse_math(False)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})
    axes.scatter([0], [-(leaves - 1) / 2], s=90, color="#000000", zorder=2)
    axes.set_xlim(-0.2, (depth + 1) * column)
    axes.set_title(title, fontsize=9).set_parse_math(False)
    axes.set_axis_off()
    bar = figure.colorbar(ScalarMappable(scale, colours), ax=axes, shrink=0.5, pad=0.01)
    bar.set_label("verifier's score", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


_SUMMARY = "summary"
"""State of the node that stands for several."""


def summarize(nodes: Sequence[Mapping[str, Any]], best: str | None) -> list[Mapping[str, Any]]:
    """Return a tree of at most ``MAX_LEAVES`` leaves if possible, with one node for the siblings that are left out."""
    drawn: list[Mapping[str, Any]] = list(nodes)
    for siblings in SIBLINGS:
        if _count_leaves(drawn) <= MAX_LEAVES:
            break
        drawn = _keep_siblings(nodes, best, siblings)
    return drawn


def _count_leaves(nodes: Sequence[Mapping[str, Any]]) -> int:
    return len({node["id"] for node in nodes} - {node["parent"] for node in nodes})


def _keep_siblings(nodes: Sequence[Mapping[str, Any]], best: str | None, count: int) -> list[Mapping[str, Any]]:
    """Keep the first ``count`` children of each node: the chosen one, then those with the best scores."""
    children: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        children.setdefault(node["parent"], []).append(node)

    def sort_key(node: Mapping[str, Any]) -> tuple[bool, bool, float]:
        is_chosen = best is not None and f"{best}.".startswith(f"{node['id']}.")
        return not is_chosen, node["state"] == "pruned", -(node["score"] or 0.0)

    kept: list[Mapping[str, Any]] = []
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        ranked = sorted(children.get(parent, ()), key=sort_key)
        # One more instead of a node for one alone.
        shown = ranked if len(ranked) <= count + 1 else ranked[:count]
        kept += shown
        waiting += [node["id"] for node in shown]
        if len(shown) < len(ranked):
            kept.append(_make_summary(parent, ranked[count:]))
    return kept


def _make_summary(parent: str, left_out: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    scores = [node["score"] for node in left_out if node["score"] is not None]
    pruned = sum(node["state"] == "pruned" for node in left_out)
    parts = [f"… {len(left_out)} more"]
    if scores:
        parts.append(f"scores {min(scores):.2f} to {max(scores):.2f}")
    if pruned:
        parts.append(f"{pruned} pruned")
    number = max(int(node["id"].rpartition(".")[2]) for node in left_out) + 1_000_000  # behind all of them
    name = f"{parent}.{number}" if parent else str(number)
    return {"id": name, "parent": parent, "score": None, "state": _SUMMARY, "text": ", ".join(parts)}


def _compute_rows(nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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


def _label(node: Mapping[str, Any], longest: int) -> str:
    text = " ".join(node["text"].split())
    return text if len(text) <= longest or node["state"] == _SUMMARY else text[: longest - 1] + "…"
