"""The benchmark's plan and its runs: for each checkpoint and case, the systems take turns."""

from __future__ import annotations

import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine.checkpoint import SIZES, Size, cache_folder, checkpoint
from benchmarks.engine.process import BenchError, Worker, installed
from benchmarks.engine.workloads import WORKLOADS

OURS = "ours"
_MADE_OF = ("torch", "numpy")
CASES = (*WORKLOADS, "cache-hit", "step")
"""The four workloads; a cached prefix against no prefix; a decode step against its matrix products."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with, and what has to be installed for it."""

    packages: tuple[str, ...]
    advice: str


PEERS = {
    "transformers": Peer(("transformers",), "transformers"),
    "transformers-cb": Peer(("transformers",), "transformers"),
    "openvino-genai": Peer(("openvino-genai",), "openvino-genai (pip install 'reasoner[bench]')"),
    "llama-cpp-python": Peer(
        ("llama-cpp-python", "gguf"), "llama-cpp-python and gguf (pip install 'reasoner[bench-llama]')"
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    models: tuple[str, ...] = tuple(SIZES)
    cases: tuple[str, ...] = CASES
    peers: tuple[str, ...] = tuple(PEERS)
    rounds: int = 3
    threads: int = 1
    peer_python: str | None = None
    """An interpreter that has the peers which this one lacks."""
    sizes: Mapping[str, Size] = field(default_factory=lambda: SIZES)
    cache: Path = field(default_factory=cache_folder)
    """Where the checkpoints are kept."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. ``ratio`` > 1 means that we are ahead."""

    case: str
    metric: str
    unit: str
    ours: float
    peer: str
    peer_value: float
    ratio: float


@dataclass(slots=True)
class Measured:
    """Everything that was seen. ``runs``: case, then system, then the value of each round."""

    rows: list[Row] = field(default_factory=list)
    runs: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)


_Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Listener:
    """Where progress goes."""

    total: Callable[[int], None]
    """Hears once how many steps there will be."""
    step: _Tell
    """Hears what comes next."""
    say: _Tell
    """Takes a line that stays."""


def measure(plan: Plan, listener: Listener) -> Measured:
    """Runs the plan. Raises ``BenchError`` when a system fails or does not compute the same model as the others."""
    pythons, versions = _interpreters(plan, listener)
    measured = Measured(versions=versions)
    listener.total(_steps_ahead(plan, len(pythons)))
    for model in plan.models:
        folder = checkpoint(model, plan.sizes[model], plan.cache)
        with ExitStack() as running:
            logs = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-bench-")))
            workers = {
                system: running.enter_context(
                    Worker(system, folder, threads=plan.threads, log=logs / f"{system}.log", python=python)
                )
                for system, python in pythons.items()
            }
            for system, worker in workers.items():
                listener.step(f"{model}: {system} loads")
                worker.ready()
            _compare_models(workers)
            if not measured.ceilings:
                measured.ceilings = workers[OURS].call("ceilings")
            for case in plan.cases:
                _case(case, model, workers, plan, listener, measured)
    return measured


def _case(
    case: str, model: str, workers: Mapping[str, Worker], plan: Plan, listener: Listener, measured: Measured
) -> None:
    name = case if model == "50M" else f"{case} {model}"
    if case in WORKLOADS:
        values = _workload(case, name, workers, plan, listener)
        measured.runs[name] = values
        medians = {system: statistics.median(each) for system, each in values.items()}
        ours = medians[OURS]
        measured.rows += [
            Row(name, "generated tokens", "tokens/s", ours, peer, value, ours / value)
            for peer, value in medians.items()
            if peer != OURS
        ]
    elif case == "cache-hit":
        _cache_hit(name, workers[OURS], plan, listener, measured)
    else:
        _steps(model, workers[OURS], plan, listener, measured)


def _workload(
    case: str, name: str, workers: Mapping[str, Worker], plan: Plan, listener: Listener
) -> dict[str, list[float]]:
    for system, worker in workers.items():
        listener.step(f"{name} warm-up: {system}")
        worker.call("warm_up", case=case)
    values: dict[str, list[float]] = {system: [] for system in workers}
    for index in range(plan.rounds):
        for system, worker in workers.items():
            listener.step(f"{name} round {index + 1}/{plan.rounds}: {system}")
            seen = worker.call("run", case=case, seed=_seed(name, index))
            values[system].append(seen["tokens"] / seen["seconds"])
    for system, each in values.items():
        listener.say(f"{name:9} {system:17} {statistics.median(each):8.1f} tokens/s  ({_spread(each)})")
    return values


def _cache_hit(name: str, ours: Worker, plan: Plan, listener: Listener, measured: Measured) -> None:
    hits: list[dict[str, float]] = []
    for index in range(plan.rounds):
        listener.step(f"{name} round {index + 1}/{plan.rounds}")
        hits.append(ours.call("cache_hit", seed=_seed(name, index)))
    measured.runs[name] = {part: [1000 * each[part] for each in hits] for part in ("hit", "alone")}
    hit, alone = (statistics.median(measured.runs[name][part]) for part in ("hit", "alone"))
    metric = "first token of 10 new tokens behind 2,000 cached ones"
    measured.rows.append(Row(name, metric, "ms", hit, "10 tokens alone", alone, alone / hit))
    listener.say(f"{name:9} {hit:.1f} ms behind 2,000 cached tokens, {alone:.1f} ms alone: {hit / alone:.2f}×")


def _steps(model: str, ours: Worker, plan: Plan, listener: Listener, measured: Measured) -> None:
    for case in ("W1", "W4"):
        name = f"{case} step" if model == "50M" else f"{case} step {model}"
        steps: list[float] = []
        floors: list[float] = []
        work: dict[str, float] = {}
        for index in range(plan.rounds):
            listener.step(f"{name} round {index + 1}/{plan.rounds}")
            step = ours.call("decode_step", case=case, seed=_seed(name, index))
            work = ours.call("products", rows=int(step["rows"]))
            steps.append(1000 * step["seconds"])
            floors.append(1000 * work["seconds"])
        measured.runs[name] = {OURS: steps, "matrix products alone": floors}
        mean, floor = statistics.median(steps), statistics.median(floors)
        measured.rows.append(Row(name, "decode step", "ms", mean, "matrix products alone", floor, floor / mean))
        # A step reads every weight once: one row waits for the memory, many rows for the processor.
        if case == "W4":
            read, top = work["bytes"] / mean / 1e6, measured.ceilings["read"] / 1e9
            measured.rows.append(Row(name, "weights read", "GB/s", read, "memory read", top, read / top))
        else:
            done, top = work["flops"] / mean / 1e6, measured.ceilings["flops"] / 1e9
            measured.rows.append(Row(name, "matrix products", "GFLOP/s", done, "product of 2048³", top, done / top))
        listener.say(f"{name:9} {mean:.2f} ms, matrix products alone {floor:.2f} ms: {floor / mean:.0%}")


def _steps_ahead(plan: Plan, systems: int) -> int:
    """How often ``measure`` says what comes next."""
    timed = sum(case in WORKLOADS for case in plan.cases) * systems * (plan.rounds + 1)
    ours = plan.rounds * (("cache-hit" in plan.cases) + 2 * ("step" in plan.cases))
    return len(plan.models) * (systems + timed + ours)


def _interpreters(plan: Plan, listener: Listener) -> tuple[dict[str, str], dict[str, str]]:
    """The systems to run with the interpreter of each, and the versions of what they are made of."""
    packages = tuple(dict.fromkeys(name for peer in PEERS.values() for name in peer.packages))
    here = installed((*packages, *_MADE_OF))
    there = installed(packages, plan.peer_python) if plan.peer_python else {}
    pythons = {OURS: sys.executable}
    versions = {name: here[name] for name in _MADE_OF}
    for name in plan.peers:
        needs = PEERS[name].packages
        python, found = (sys.executable, here) if set(needs) <= set(here) else (plan.peer_python, there)
        if python is None or not set(needs) <= set(found):
            listener.say(f"{name} is left out: install {PEERS[name].advice}, or name an interpreter with --peer-python")
            continue
        pythons[name] = python
        versions |= {package: found[package] for package in needs}
    return pythons, versions


def _compare_models(workers: Mapping[str, Worker]) -> None:
    said = {system: worker.call("greedy") for system, worker in workers.items()}
    for system, tokens in said.items():
        if tokens != said[OURS]:
            raise BenchError(
                f"{system} does not compute the same model: its likeliest tokens are {tokens}, ours {said[OURS]}"
            )


def _seed(name: str, index: int) -> int:
    """Prompts of their own for every case and round, the same for all systems."""
    return zlib.crc32(f"{name} {index}".encode())


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.1f} – {max(values):.1f}"
