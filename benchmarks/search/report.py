"""Report of the search benchmark: the JSON document, the Markdown tables and the chart."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.measure import OURS, Measured
from benchmarks.engine.report import machine, tables
from benchmarks.search.measure import FULL, SearchPlan

_METHOD = (
    "W3 scored: a prompt of 512 tokens, 8 rounds of 8 beams of 32 tokens; the verifier scores each beam's step, the 4 "
    "best survive and are doubled. Policy and verifier have random float32 weights of this size; temperature 1, end of "
    "sequence ignored. `transformers` is a batched `generate` for each round and a full forward of the verifier over "
    "all solutions, `ours, scoring whole solutions` our engine without a cache for the verifier. Every system has the "
    "same prompts and number of threads and a process of its own that sleeps while others run. Runs take turns, each "
    "starts with a cold cache, and the medians are shown. 16 × 8: 16 beams, 8 steps, random weights as above or the "
    "strategy `beam` with the bundled models on held-out problems; `whole solutions` is what a verifier computes that "
    "reads every solution from its start. A ratio above 1 means that we are ahead."
)
_COLOURS = ("#D55E00", "#999999", "#E69F00")


def document(plan: SearchPlan, measured: Measured) -> dict[str, Any]:
    """Return the document of results, with the settings and every single run."""
    return {
        "machine": machine(plan.threads, measured),
        "rows": [asdict(row) for row in measured.rows],
        "settings": {
            "cases": list(plan.cases),
            "model": plan.model,
            "rounds": plan.rounds,
            "threads": plan.threads,
            "problems": plan.problems,
            "W3": asdict(plan.timed),
            "wide": asdict(plan.wide),
        },
        "runs": measured.runs,
        "left_out": [asdict(peer) for peer in measured.left_out],
    }


def markdown(document: dict[str, Any], command: str) -> str:
    """Return the tables of ``table.md``."""
    return tables(document, command, _METHOD)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a PNG: verifier tokens per generated token, and the speed of a search with scoring."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    rows = [row for row in document["rows"] if row["peer"] == FULL]
    for offset, (key, label) in enumerate((("ours", OURS), ("peer_value", FULL))):
        at = [place + 0.4 * (offset - 0.5) for place in range(len(rows))]
        bars = left.bar(at, [row[key] for row in rows], 0.4, color=_COLOURS[offset], label=label)
        left.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    left.set_xticks(range(len(rows)), [row["case"] for row in rows], fontsize=8)
    left.set_ylabel("verifier tokens computed for a generated one")
    if rows:
        left.legend(fontsize=8)
    for case, runs in document["runs"].items():
        for place, (system, values) in enumerate(runs.items()):
            middle = sorted(values)[len(values) // 2]
            spread = [[middle - min(values)], [max(values) - middle]]
            bars = right.bar([place], [middle], 0.6, yerr=spread, color=_COLOURS[place], label=system)
            right.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        right.set_xticks(range(len(runs)), [system.replace(", ", ",\n") for system in runs], fontsize=8)
        right.set_title(f"{case}, {document['settings']['threads']} threads")
    right.set_ylabel("generated tokens per second")
    for plot in (left, right):
        plot.grid(axis="y", alpha=0.3)
        plot.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
