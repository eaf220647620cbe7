"""Cost of holding branches to a JSON Schema: a decode step with masks and without, and the time to compile it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoint import SIZES, Size, cache_folder, checkpoint
from benchmarks.engine.measure import FLOAT, Listener, Measured, Row
from benchmarks.engine.process import Worker, installed
from benchmarks.engine.quantized import quantized
from benchmarks.engine.report import machine

TARGET = 5.0
"""Percent of a decode step that masks may take."""
_GRAMMARS = {"vocabulary": "reading the vocabulary", "compile": "compiling the schema", "start": "starting a branch"}


@dataclass(frozen=True, slots=True)
class ConstrainedPlan:
    """The settings of a run."""

    model: str = "250M"
    weights: str = FLOAT
    batch: int = 16
    rounds: int = 5
    threads: int = 1
    sizes: Mapping[str, Size] = field(default_factory=lambda: SIZES)
    cache: Path = field(default_factory=cache_folder)
    """Folder of the checkpoints."""


def measure_constrained(plan: ConstrainedPlan, listener: Listener) -> Measured:
    """Time steps with and without a constraint in turns, in an order that is reversed from round to round.

    Raises ``BenchError``.
    """
    folder = checkpoint(plan.model, plan.sizes[plan.model], plan.cache)
    measured = Measured(versions=installed(("torch", "numpy", "llguidance")))
    listener.total(2 + 2 * (plan.rounds + 1))
    runs: dict[str, list[float]] = {"constrained": [], "unconstrained": [], "masks": []}
    with tempfile.TemporaryDirectory(prefix="reasoner-bench-") as logs:
        own = folder if plan.weights == FLOAT else quantized(folder, plan.weights)
        with Worker("constrained", own, threads=plan.threads, log=Path(logs) / "log") as worker:
            listener.step("the engine loads")
            worker.ready()
            for turn in range(plan.rounds + 1):
                for name in ("unconstrained", "constrained") if turn % 2 else ("constrained", "unconstrained"):
                    listener.step(f"{name} {f'round {turn}/{plan.rounds}' if turn else 'warm-up'}")
                    held = name == "constrained"
                    seen = worker.call("constrained_step", seed=turn, batch=plan.batch, is_constrained=held)
                    if turn:
                        runs[name].append(1000 * seen["step"])
                    if turn and held:
                        runs["masks"].append(1000 * seen["masks"])
            listener.step("compiling")
            grammars: dict[str, list[float]] = worker.call("grammar_times", rounds=plan.rounds)
    runs |= {_GRAMMARS[name]: [1000 * value for value in values] for name, values in grammars.items()}
    measured.runs[f"batch {plan.batch}"] = runs
    measured.rows += _rows(f"{plan.model} {plan.weights}, batch {plan.batch}", runs)
    for row in measured.rows:
        listener.say(f"{row.metric}: {row.ours:.2f} {row.unit} ({row.peer} {row.peer_value:.2f})")
    return measured


def _rows(case: str, runs: Mapping[str, list[float]]) -> list[Row]:
    medians = {name: statistics.median(values) for name, values in runs.items()}
    step, free, masks = medians["constrained"], medians["unconstrained"], medians["masks"]
    slower = 100 * statistics.median(
        own / other - 1 for own, other in zip(runs["constrained"], runs["unconstrained"], strict=True)
    )
    share = 100 * masks / step
    rows = [
        Row(case, "decode step", "ms", step, "unconstrained", free, free / step),
        Row(case, "masks of a step", "ms", masks, "decode step", step, step / masks),
        Row(case, "masks' share of a step", "%", share, "target", TARGET, TARGET / share),
        Row(case, "step longer by", "%", slower, "target", TARGET, (100 + TARGET) / (100 + slower)),
    ]
    for name in _GRAMMARS.values():
        rows.append(Row("grammar", name, "ms", medians[name], "decode step", step, step / medians[name]))
    return rows


def document(plan: ConstrainedPlan, measured: Measured) -> dict[str, Any]:
    """Return the document of results, with the settings and every single run."""
    settings = {"model": plan.model, "weights": plan.weights, "batch": plan.batch, "rounds": plan.rounds}
    return {
        "machine": machine(plan.threads, measured),
        "rows": [asdict(row) for row in measured.rows],
        "settings": settings | {"threads": plan.threads},
        "runs": measured.runs,
    }


def markdown(document: dict[str, Any], command: str) -> str:
    """Return the table of ``table.md``."""
    about, settings = document["machine"], document["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    lines = [
        f"`{command}`",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['threads']} threads; {versions}; a vocabulary of 32,000 "
        f"tokens. Steps with and without a constraint take turns on one engine, in an order that alternates; medians "
        f"of {settings['rounds']} runs of 127 steps. The share that masks take is measured inside the engine, how "
        "much longer a step is by whole steps: one without constraints also samples in recorded kernels.",
        "",
        "| case | metric | unit | value | beside | its value |",
        "|---|---|---|---:|---|---:|",
    ]
    for row in document["rows"]:
        values = f"{row['ours']:.2f} | {row['peer']} | {row['peer_value']:.2f}"
        lines.append(f"| {row['case']} | {row['metric']} | {row['unit']} | {values} |")
    return "\n".join(lines) + "\n"
