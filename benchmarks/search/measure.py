"""Plan and runs of the search benchmark: verifier tokens per generated token, and W3 with scoring, systems in turn."""

from __future__ import annotations

import statistics
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import reasoner
from benchmarks.engine.checkpoint import SIZES, Size, cache_folder, checkpoint
from benchmarks.engine.measure import OURS, Listener, Measured, Row
from benchmarks.engine.process import BenchError, Worker, installed
from benchmarks.engine.running import Systems
from benchmarks.search.verifier import verifier
from benchmarks.search.workload import W3, WIDE, Seen, Shape
from reasoner.evaluation.suites import registry

CASES = ("tokens", "W3")
"""``tokens``: verifier tokens of beam searches with 16 beams and 8 steps; ``W3``: time of a search with scoring."""
PLAIN, RESCORING = "transformers", "ours, scoring whole solutions"
FULL = "whole solutions"
"""Peer that stands for a verifier without a cache, which computes all its input tokens."""
_BUNDLED_MODELS = "bundled models"
BUNDLED = Path(reasoner.__file__).parent / "bundled"
_TOKENS_METRIC = "verifier tokens computed for a generated one"


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """Settings of a run."""

    cases: tuple[str, ...] = CASES
    model: str = "50M"
    rounds: int = 5
    problems: int = 40
    """Number of problems of each bundled suite for the strategy ``beam``."""
    threads: int = 1
    sizes: Mapping[str, Size] = field(default_factory=lambda: SIZES)
    timed: Shape = W3
    wide: Shape = WIDE
    cache: Path = field(default_factory=cache_folder)
    """Folder of the checkpoints."""


def measure(plan: SearchPlan, listener: Listener) -> Measured:
    """Run the plan; plain transformers are left out once they fail. Raises ``BenchError`` if our engine fails."""
    measured = Measured(versions=installed(("torch", "numpy", "transformers")))
    listener.total(_steps_ahead(plan))
    policy = checkpoint(plan.model, plan.sizes[plan.model], plan.cache)
    prm = verifier(policy)
    with ExitStack() as running:
        logs = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-bench-")))
        systems = running.enter_context(Systems((PLAIN,), listener.say, measured.left_out))
        bench = _Bench(plan, listener, measured, systems, logs)
        bench.start(OURS, "search", policy, prm)
        ours = systems.workers[OURS]
        measured.ceilings = ours.call("ceilings")
        if "tokens" in plan.cases:
            bench.wide(ours)
            bench.start(_BUNDLED_MODELS, "search", BUNDLED / "policy", BUNDLED / "prm")
            bench.jobs(systems.workers[_BUNDLED_MODELS])
            systems.workers.pop(_BUNDLED_MODELS).close()
        if "W3" in plan.cases:
            bench.start(RESCORING, "search", policy, prm, rescoring=True)
            bench.start(PLAIN, "search-transformers", policy, prm)
            bench.timed()
    return measured


@dataclass(frozen=True, slots=True)
class _Bench:
    """The benchmark's cases; results are added to ``measured``."""

    plan: SearchPlan
    listener: Listener
    measured: Measured
    systems: Systems
    logs: Path

    def start(self, name: str, system: str, policy: Path, prm: Path, **options: bool) -> None:
        """Add a system in a process of its own, with both checkpoints loaded."""
        self.listener.step(f"{name} loads")
        log = self.logs / f"{len(list(self.logs.iterdir()))}.log"

        stage = f"{policy.name} loads"
        settings = {"prm": str(prm)} | options
        start = partial(Worker, system, policy, threads=self.plan.threads, log=log, options=settings, name=name)
        self.systems.start(name, stage, start)
        if name in self.systems.workers:
            with self.systems.allow_failure(name, stage):
                self.systems.workers[name].ready()

    def wide(self, worker: Worker) -> None:
        """Measure with random weights: all beams differ, so only tokens that beams share are saved."""
        shape = self.plan.wide
        self.listener.step(f"{shape.beams} beams")
        self._tokens(f"{shape.beams} × {shape.rounds}, {self.plan.model}", [_search(worker, shape, _seed("wide", 0))])

    def jobs(self, worker: Worker) -> None:
        """Measure the service's own strategy on real problems."""
        for name in registry.POLICY_SUITES:
            self.listener.step(f"beam on {name}")
            problems = [problem.text for problem in registry.load_problems(name, limit=self.plan.problems)]
            seed, heat = _seed(name, 0), registry.get_family(name).TEMPERATURE
            told = worker.call("beam_jobs", problems=problems, temperature=heat, seed=seed)
            self._tokens(f"16 × 8, {name}", [Seen(**told)])

    def timed(self) -> None:
        """Time all systems in turn on the same questions."""
        shape, case = self.plan.timed, f"W3 scored, {self.plan.model}"
        short = Shape(**asdict(shape) | {"rounds": 2, "tokens": min(8, shape.tokens)})

        def search(stage: str, shape: Shape, seed: int) -> dict[str, Seen]:
            def run(name: str, worker: Worker) -> Seen:
                self.listener.step(f"{stage}: {name}")
                return _search(worker, shape, seed)

            return self.systems.run_each(stage, run)

        search("warm-up", short, 0)
        rounds = [
            search(f"round {turn + 1}/{self.plan.rounds}", shape, _seed("W3", turn)) for turn in range(self.plan.rounds)
        ]
        seen = {name: [each[name] for each in rounds] for name in self.systems.workers}
        self._tokens(case, seen[OURS])
        speeds = {name: [one.generated / one.seconds for one in each] for name, each in seen.items()}
        self.measured.runs[case] = speeds
        for name in seen:
            if name != OURS:
                ours, theirs = (statistics.median(speeds[one]) for one in (OURS, name))
                self.measured.rows.append(Row(case, "generated tokens", "tokens/s", ours, name, theirs, ours / theirs))
        waits = {name: statistics.median(one.scoring for one in each) for name, each in seen.items()}
        for name in seen:
            if name != OURS:
                ratio = waits[name] / waits[OURS]
                row = Row(case, "time in which scores are waited for", "s", waits[OURS], name, waits[name], ratio)
                self.measured.rows.append(row)
        for name, each in seen.items():
            spread = f"{min(speeds[name]):.1f} – {max(speeds[name]):.1f}"
            seconds = statistics.median(one.seconds for one in each)
            self.listener.say(
                f"{case}: {name}: {statistics.median(speeds[name]):.1f} tokens/s ({spread}); "
                f"{seconds:.2f} s, {waits[name]:.2f} s of them for scores"
            )

    def _tokens(self, case: str, seen: list[Seen]) -> None:
        generated = sum(one.generated for one in seen)
        ours = sum(one.computed for one in seen) / generated
        full = sum(one.computed + one.cached for one in seen) / generated
        self.measured.rows.append(Row(case, _TOKENS_METRIC, "tokens", ours, FULL, full, full / ours))
        self.listener.say(f"{case}: {ours:.2f} verifier tokens for a generated one; whole solutions: {full:.2f}")


def _search(worker: Worker, shape: Shape, seed: int) -> Seen:
    seen = Seen(**worker.call("scored_search", shape=asdict(shape), seed=seed))
    if seen.generated != shape.rounds * shape.beams * shape.tokens:
        raise BenchError(f"{worker.system} generated {seen.generated} tokens")
    return seen


def _steps_ahead(plan: SearchPlan) -> int:
    """Return the number of progress steps of ``measure``."""
    tokens = 2 + len(registry.POLICY_SUITES) if "tokens" in plan.cases else 0
    timed = 2 + 3 * (1 + plan.rounds) if "W3" in plan.cases else 0
    return 1 + tokens + timed


def _seed(case: str, turn: int) -> int:
    """Return a seed for every case and turn, the same for all systems."""
    return zlib.crc32(f"search {case} {turn}".encode())
