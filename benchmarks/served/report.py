"""Report: ``results.json``, ``table.md`` and a chart of goodput and waiting by load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.measure import OURS, Measured
from benchmarks.engine.report import machine
from benchmarks.engine.running import LeftOut
from benchmarks.served.aiperf import INPUT_TOKENS, OUTPUT_TOKENS, Level
from benchmarks.served.measure import Served, ServedPlan
from benchmarks.served.servers import LLAMA, VLLM

# Okabe and Ito's colours: distinguishable with any kind of colour vision.
_STYLES = {OURS: ("#D55E00", "o"), LLAMA: ("#009E73", "s"), VLLM: ("#0072B2", "^")}


def document(plan: ServedPlan, served: Served, model: str, command: str) -> dict[str, Any]:
    """Return the document of results."""
    order = {server.name: place for place, server in enumerate(plan.servers)}
    levels = sorted(served.levels, key=lambda level: (level.streams, order[level.server]))
    return {
        "command": command,
        "machine": machine(len(plan.cores), Measured(versions=served.versions)),
        "settings": {
            "model": model,
            "input_tokens": INPUT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "seconds": plan.tool.seconds,
            "limits": asdict(plan.tool.limits),
            "server_cores": len(plan.cores),
            "tool_cores": len(plan.tool.cores),
            "forms": {server.name: server.form for server in plan.servers if server.name in served.versions},
        },
        "levels": [asdict(level) for level in levels],
        "left_out": [asdict(peer) for peer in served.left_out],
    }


def markdown(told: dict[str, Any]) -> str:
    """Return the table of a document, with what was run and how."""
    about, settings = told["machine"], told["settings"]
    limits = settings["limits"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    forms = "; ".join(f"{name}: {form}" for name, form in settings["forms"].items())
    lines = [
        f"`{told['command']}`",
        "",
        f"{about['processor']}, {about['cores']} cores: {settings['server_cores']} for the servers, "
        f"{settings['tool_cores']} for AIPerf. Python {about['python']}, {versions}.",
        "",
        f"{settings['model']} random float32 weights. {forms}. Every request has a prompt of its own of "
        f"{settings['input_tokens']} tokens and gets {settings['output_tokens']}, at temperature 1 without filters, "
        "end of sequence ignored, as a stream over a connection of its own. As many requests as streams run at once "
        f"for {settings['seconds']} s, from a common start; servers take turns at each load, and idle otherwise. All "
        f"figures are AIPerf's. A good request has its first token after {limits['first_ms']:g} ms at most, and then "
        f"one in {limits['token_ms']:g} ms on average.",
        "",
        "| streams | server | requests | failed | first token, p50 ms | p99 ms | token, p50 ms | p99 ms | tokens/s "
        "| good/s | good |",
        "|---:|---|" + "---:|" * 9,
    ]
    for row in told["levels"]:
        level = Level(**row)
        times = (level.first_p50, level.first_p99, level.token_p50, level.token_p99)
        lines.append(
            f"| {level.streams} | {level.server} | {level.requests} | {level.failed} | "
            + " | ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in times)
            + f" | {level.tokens_per_second:.0f} | {level.goodput:.2f} | {100 * level.good_share:.0f} % |"
        )
    left_out = [f"\n{LeftOut(**peer).describe()}" for peer in told["left_out"]]
    return "\n".join([*lines, *left_out]) + "\n"


def draw(told: dict[str, Any], path: Path) -> None:
    """Write a PNG: goodput on the left, the time to the first token (p99) on the right, a line for each server."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    levels = [Level(**row) for row in told["levels"]]
    figure, axes = pyplot.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    for name, (colour, marker) in _STYLES.items():
        line = [level for level in levels if level.server == name]
        if not line:
            continue
        streams = [level.streams for level in line]
        for panel, values in zip(
            axes, ([level.goodput for level in line], [level.first_p99 for level in line]), strict=True
        ):
            panel.plot(streams, values, color=colour, marker=marker, ms=4.5, lw=1.5, label=name)
    first_ms = told["settings"]["limits"]["first_ms"]
    axes[1].axhline(first_ms, color="black", linestyle="--", lw=1)
    axes[1].annotate("limit", (1, first_ms), (0, 3), textcoords="offset points", fontsize=8)
    axes[1].set_yscale("log")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("good requests a second")
    axes[1].set_ylabel("time to the first token, p99, ms")
    _label_axes(axes, sorted({level.streams for level in levels}))
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _label_axes(axes: Any, streams: Sequence[int]) -> None:
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xticks(streams, [str(count) for count in streams])
        panel.set_xlabel("streams at once")
        panel.grid(alpha=0.25, which="major", linewidth=0.5)
        panel.spines[["top", "right"]].set_visible(False)
