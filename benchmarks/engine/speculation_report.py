"""Report of the speculation benchmark: the JSON document, the Markdown tables and the chart."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.measure import Measured
from benchmarks.engine.problems import PLAIN
from benchmarks.engine.report import machine, tables
from benchmarks.engine.speculation import BATCHES, SpeculationPlan

_METHOD = (
    "The bundled policy on held-out Countdown and word problems, half each, at their suites' temperatures, in batches, "
    "and the larger bundled model with its drafter; thoughts: 16 branches of one Countdown problem after the other "
    "with the thinking policy, up to 1,400 tokens each, drafted from siblings' n-grams; `n-grams of 1 to 4` are drafts "
    "from n-grams of at most four tokens that ignore the sampling noise; 250M: random weights, prompts of 32 tokens, "
    "temperature 1, and a simulated drafter without cost and with the given acceptance rate, on 96 tokens of each "
    "sequence or more: a controller learns from steps, however long they take; W3: rounds of 8 "
    "beams on Countdown; policy-250M: the policy "
    "in a network of 250 million parameters that computes the same, so that steps cost what they do where weights "
    "have to be read and texts repeat themselves as real ones do. Float32, every system with the same prompts and "
    "number of threads, in a process of its own that sleeps while others run. Plain decoding runs next to each "
    "speculative run on the same engine, since two processes of the same code differ by some percent; a ratio is the "
    "median of these pairs', and the speed beside it is our median divided by the ratio; the order alternates from "
    "pair to pair. Runs take turns after one that is not timed, on the large model three; each starts with a cold "
    "cache and without n-grams, except in W3, where n-grams of the searches before are kept, twelve turns of which "
    "are not timed: every turn has problems of its own. A ratio above 1 means that speculative decoding is faster. "
    "`controller` is the policy's default drafter, `always 4` the same with four draft tokens for each branch at every "
    "step, without a controller."
)
_PANELS = {"batch": "bundled policy", "policy-large": "bundled policy-large", "250M": "250M, simulated"}
"""Title of a panel by the first word of a case."""


def document(plan: SpeculationPlan, measured: Measured) -> dict[str, Any]:
    """Return the document of results, with the settings and every single run."""
    return {
        "machine": machine(plan.threads, measured),
        "rows": [asdict(row) for row in measured.rows],
        "settings": {"cases": list(plan.cases), "rounds": plan.rounds, "threads": plan.threads},
        "runs": measured.runs,
        "left_out": [asdict(peer) for peer in measured.left_out],
    }


def markdown(document: dict[str, Any], command: str) -> str:
    """Return the tables of ``table.md``."""
    return tables(document, command, _METHOD)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a PNG: speedup over plain decoding by batch size; a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, dict[str, list[tuple[int, float]]]] = {title: {} for title in _PANELS.values()}
    for row in document["rows"]:
        words = row["case"].split(" ")
        if row["unit"] == "tokens/s" and row["peer"] == PLAIN and "batch" in words:
            place = words.index("batch")
            batch = int(words[place + 1])
            name = f"{words[1]} right" if words[0] == "250M" else words[place + 2]
            panels[_PANELS[words[0]]].setdefault(name, []).append((batch, row["ratio"]))
    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    for plot, (title, drafters) in zip(axes, panels.items(), strict=True):
        for name, points in drafters.items():
            plot.plot(*zip(*points, strict=True), marker="o", label=name)
        plot.axhline(1.0, color="black", linewidth=0.8)
        plot.set_xscale("log", base=2)
        plot.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        plot.set_xlabel("branches at a time")
        plot.set_ylabel("times as fast as plain decoding")
        plot.set_title(f"{title}, {document['settings']['threads']} threads")
        plot.grid(alpha=0.3)
        if drafters:
            plot.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
