"""Decoding with quantized weights on the CPU compared with float32: the same engine, checkpoint and prompts."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoint import SIZES, Size, cache_folder, checkpoint
from benchmarks.engine.measure import OURS, Listener, Measured, Row
from benchmarks.engine.process import Worker, installed
from benchmarks.engine.quantized import VARIANTS, quantized
from benchmarks.engine.report import machine

FLOAT = "float32"
BATCHES = (1, 16)
SYSTEMS = {FLOAT: (FLOAT, "auto"), **{name: (name, "auto") for name in VARIANTS}, "int8, KV int8": ("int8", "int8")}
"""Types of the weights, and of keys and values."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The settings of a run."""

    model: str = "250M"
    rounds: int = 5
    threads: int = 1
    sizes: Mapping[str, Size] = field(default_factory=lambda: SIZES)
    cache: Path = field(default_factory=cache_folder)
    """Folder of the checkpoints."""


def measure_cpu(plan: CpuPlan, listener: Listener) -> Measured:
    """Run all of ``SYSTEMS`` in each round, in an order that is reversed from round to round. Raises ``BenchError``."""
    folder = checkpoint(plan.model, plan.sizes[plan.model], plan.cache)
    measured = Measured(versions=installed(("torch", "numpy")))
    listener.total(len(SYSTEMS) * (1 + len(BATCHES) * (plan.rounds + 1)))
    with ExitStack() as running:
        logs = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-bench-")))
        workers = {}
        for name, (weights, kv_dtype) in SYSTEMS.items():
            listener.step(f"{name} loads")
            own = folder if weights == FLOAT else quantized(folder, weights)
            options = {"kv_dtype": kv_dtype}
            worker = Worker(OURS, own, threads=plan.threads, log=logs / f"{weights}-{kv_dtype}.log", options=options)
            workers[name] = running.enter_context(worker)
            worker.ready()
        for batch in BATCHES:
            _case(batch, workers, plan.rounds, listener, measured)
    return measured


def _case(batch: int, workers: Mapping[str, Worker], rounds: int, listener: Listener, measured: Measured) -> None:
    speeds: dict[str, list[float]] = {weights: [] for weights in workers}
    for turn in range(rounds + 1):
        for weights in workers if turn % 2 else reversed(list(workers)):
            listener.step(f"batch {batch} {f'round {turn}/{rounds}' if turn else 'warm-up'}: {weights}")
            seconds = workers[weights].call("decode", batch=batch, seed=turn)["seconds"]
            if turn:
                speeds[weights].append(batch / seconds)
    medians = {weights: statistics.median(values) for weights, values in speeds.items()}
    for weights, median in medians.items():
        measured.runs.setdefault(f"decode batch {batch}", {})[weights] = speeds[weights]
        listener.say(f"batch {batch:2} {weights:13} {median:8.1f} tokens/s ({median / medians[FLOAT]:.2f}×)")
        if weights != FLOAT:
            name, floor = f"decode {weights} batch {batch}", medians[FLOAT]
            measured.rows.append(Row(name, "generated tokens", "tokens/s", median, FLOAT, floor, median / floor))


def document(plan: CpuPlan, measured: Measured) -> dict[str, Any]:
    """Return the document of results, with the settings and every single run."""
    return {
        "machine": machine(plan.threads, measured),
        "rows": [asdict(row) for row in measured.rows],
        "settings": {"model": plan.model, "rounds": plan.rounds, "threads": plan.threads},
        "runs": measured.runs,
    }


def markdown(document: dict[str, Any], command: str) -> str:
    """Return the table of ``table.md``."""
    about, settings = document["machine"], document["settings"]
    lines = [
        f"`{command}`",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['threads']} threads; "
        f"{settings['model']} parameters; medians of {settings['rounds']} runs.",
        "",
        "| case | tokens/s | beside | its tokens/s | ratio |",
        "|---|---:|---|---:|---:|",
    ]
    lines += [
        f"| {row['case']} | {row['ours']:.1f} | {row['peer']} | {row['peer_value']:.1f} | {row['ratio']:.2f} |"
        for row in document["rows"]
    ]
    return "\n".join(lines) + "\n"
