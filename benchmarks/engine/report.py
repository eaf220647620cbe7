"""Report of the engine benchmark: the JSON document, the Markdown tables and the chart."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from math import nan
from pathlib import Path
from typing import Any

from benchmarks.engine.measure import OURS, Measured, Plan, Row
from benchmarks.engine.running import LeftOut
from reasoner.evaluation.origin import name_processor

# Okabe and Ito's colours: distinguishable with any kind of colour vision.
_COLOURS = {
    OURS: "#D55E00",
    "openvino-genai": "#0072B2",
    "llama-cpp-python": "#009E73",
    "transformers": "#E69F00",
    "transformers-cb": "#999999",
    "openvino-genai-int8": "#56B4E9",
    "llama-cpp-python-Q8_0": "#F0E442",
    "llama-cpp-python-Q4_0": "#CC79A7",
}
_METHOD = (
    "Random weights, float32 KV, temperature 1 without filters, end of sequence ignored, every system with the same "
    "prompts and number of threads, in a process of its own that sleeps while others run. Runs take turns; each starts "
    "with a cold cache; the medians are shown. A ratio above 1 means that we are ahead."
)


def document(plan: Plan, measured: Measured) -> dict[str, Any]:
    """Return the document of results, with the settings and every single run."""
    return {
        "machine": machine(plan.threads, measured),
        "rows": [asdict(row) for row in measured.rows],
        "settings": {
            "models": list(plan.models),
            "cases": list(plan.cases),
            "rounds": plan.rounds,
            "threads": plan.threads,
            "weights": plan.weights,
            "sampling": "temperature 1",
        },
        "runs": measured.runs,
        "left_out": [asdict(peer) for peer in measured.left_out],
    }


def machine(threads: int, measured: Measured) -> dict[str, Any]:
    """Return the machine's processor, versions, and its ceilings if they were measured."""
    about: dict[str, Any] = {
        "processor": name_processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": measured.versions,
    }
    if measured.ceilings:
        about["memory_read_gb_s"] = measured.ceilings["read"] / 1e9
        about["float32_product_gflop_s"] = measured.ceilings["flops"] / 1e9
    return about


def markdown(document: dict[str, Any], command: str) -> str:
    """Return the tables of ``table.md``."""
    return tables(document, command, f"{_METHOD} Our weights: {document['settings']['weights']}.")


def tables(document: dict[str, Any], command: str, method: str) -> str:
    """Return a page with the command, the machine, the method, a table of speeds and one of the other rows."""
    about = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    rows = [Row(**row) for row in document["rows"]]
    lines = [
        f"`{command}`",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['threads']} threads; reads "
        f"{about['memory_read_gb_s']:.1f} GB/s, multiplies {about['float32_product_gflop_s']:.0f} GFLOP/s (2048³). "
        f"Python {about['python']}, {versions}.",
        "",
        f"{method} Rounds: {document['settings']['rounds']}.",
        "",
    ]
    speeds = speed_table(rows)
    if len(speeds) > 1:
        lines += [
            "Tokens per second (of the case prompt, those of the prompt)"
            + (", in brackets how many times as fast we are:" if speeds[0][2:] else ":"),
            "",
            _line(speeds[0]),
            "|---|" + "---:|" * (len(speeds[0]) - 1),
            *map(_line, speeds[1:]),
            "",
        ]
    others = [row for row in rows if row.unit != "tokens/s"]
    if others:
        lines += [
            "| case | metric | unit | ours | beside | its value | ratio |",
            "|---|---|---|---:|---|---:|---:|",
            *(
                _line([row.case, row.metric, row.unit, f"{row.ours:.2f}", row.peer or "", f"{row.peer_value:.2f}"])
                + f" {row.ratio:.2f} |"
                for row in others
            ),
            "",
        ]
    lines += [f"{LeftOut(**peer).describe()}\n" for peer in document.get("left_out", ())]
    return "\n".join(lines)


def speed_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return a heading and a line for each workload: ours, then each peer's speed with the ratio; nothing in place of
    a peer without a value.
    """
    speeds = [row for row in rows if row.unit == "tokens/s"]
    peers = list(dict.fromkeys(row.peer for row in speeds if row.peer is not None))
    table = [["case", OURS, *peers]]
    for case in dict.fromkeys(row.case for row in speeds):
        of_case = {row.peer: row for row in speeds if row.case == case}
        ours = next(iter(of_case.values())).ours
        cells = [
            f"{of_case[peer].peer_value:.1f} ({of_case[peer].ratio:.2f}×)" if peer in of_case else "" for peer in peers
        ]
        table.append([case, f"{ours:.1f}", *cells])
    return table


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a PNG: a group of bars for each workload, a panel for each model; whiskers span the single runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = {row["case"] for row in document["rows"] if row["unit"] == "tokens/s"}
    runs: dict[str, dict[str, list[float]]] = {case: runs for case, runs in document["runs"].items() if case in speeds}
    panels: dict[str, list[str]] = {}
    for case in runs:
        panels.setdefault(case.partition(" ")[2] or "50M", []).append(case)
    values = {(row["case"], row["peer"]): row["peer_value"] for row in document["rows"]}
    values |= {(row["case"], OURS): row["ours"] for row in document["rows"] if row["unit"] == "tokens/s"}
    systems = [name for name in _COLOURS if any(name in each for each in runs.values())]
    figure, axes = pyplot.subplots(
        1, max(1, len(panels)), figsize=(7 * max(1, len(panels)), 4.5), layout="constrained", squeeze=False
    )
    width = 0.8 / max(1, len(systems))
    for plot, (model, cases) in zip(axes[0], panels.items(), strict=False):
        for index, system in enumerate(systems):
            at = [place + (index - (len(systems) - 1) / 2) * width for place in range(len(cases))]
            # A peer that was left out of a case has no bar there.
            heights = [values.get((case, system), nan) for case in cases]
            each = [runs[case].get(system, [nan]) for case in cases]
            spread = [
                [height - min(speeds) for speeds, height in zip(each, heights, strict=True)],
                [max(speeds) - height for speeds, height in zip(each, heights, strict=True)],
            ]
            bars = plot.bar(at, heights, width, yerr=spread, color=_COLOURS[system], label=system)
            plot.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
        plot.set_xticks(range(len(cases)), [case.partition(" ")[0] for case in cases])
        settings = document["settings"]
        plot.set_title(f"{model} parameters, {settings['weights']}, {settings['threads']} threads")
        plot.set_ylabel("generated tokens per second")
        plot.grid(axis="y", alpha=0.3)
        plot.set_axisbelow(True)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
