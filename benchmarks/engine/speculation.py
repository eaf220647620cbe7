"""Speculative decoding beside plain decoding: every drafter on real problems, simulated ones on a large model, and a
tree search. Runs take turns, and whoever guesses must give the tokens of plain decoding."""

from __future__ import annotations

import json
import statistics
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import reasoner
from benchmarks.engine.checkpoint import SIZES, Size, cache_folder, checkpoint
from benchmarks.engine.measure import Listener, Measured, Row
from benchmarks.engine.problems import Prompt, Solved
from benchmarks.engine.process import BenchError, Worker, installed
from benchmarks.engine.workloads import VOCAB
from reasoner import suites

BATCHES = (1, 4, 16, 64)
CASES = (*(f"batch-{batch}" for batch in BATCHES), "policy-large", "250M", "W3")
"""Problems, so many at a time, and the same for the larger bundled model; simulated drafters on a large model; a tree
search."""
LARGE_BATCHES = (1, 4)
PLAIN, ALWAYS, ASSISTED, LOOKUP = "plain", "always 4", "transformers-assisted", "transformers-lookup"
BUNDLED = Path(reasoner.__file__).parent / "bundled"
_LARGE = {PLAIN: {"draft": "off"}, "draft_model": {"draft": "auto"}, "ngram": {"draft": "ngram"}}
"""How the larger bundled model is run."""
_SOLUTION, _STEP = 256, 32
"""Most tokens of a solution, and of a step of the tree search."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much is done in one run."""

    problems: Mapping[int, int] = field(default_factory=lambda: {1: 32, 4: 64, 16: 160, 64: 384})
    """By batch."""
    tokens: Mapping[int, int] = field(default_factory=lambda: {1: 128, 4: 96, 16: 48, 64: 24})
    """Of each sequence of the large model, by batch."""
    searches: int = 16


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """What to measure."""

    cases: tuple[str, ...] = CASES
    heads: tuple[str, ...] = ()
    """Folders of drafting heads for the bundled policy, beside the drafter that it ships with."""
    rounds: int = 3
    threads: int = 1
    large: Size = SIZES["250M"]
    right: tuple[float, ...] = (0.6, 0.8, 0.9)
    """How often simulated guesses are right."""
    work: Work = field(default_factory=Work)
    cache: Path = field(default_factory=cache_folder)
    """Where the large checkpoint is kept."""

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of problems at a time."""
        return tuple(batch for batch in BATCHES if f"batch-{batch}" in self.cases)


def measure(plan: SpeculationPlan, listener: Listener) -> Measured:
    """Runs the plan. Raises ``BenchError`` when a system fails or answers otherwise than plain decoding."""
    policy = BUNDLED / "policy"
    drafters, shipped = _drafters(plan)
    systems: dict[str, tuple[str, dict[str, Any]]] = {PLAIN: ("guessing", {"draft": "off"})}
    systems |= {name: ("guessing", {"draft": draft}) for name, draft in drafters.items()}
    if plan.batches:
        systems[ALWAYS] = ("guessing", {"draft": drafters[shipped], "always": 4})
    if 1 in plan.batches:
        systems[ASSISTED] = (ASSISTED, {"assistant": str(BUNDLED / "draft")})
        systems[LOOKUP] = (ASSISTED, {"assistant": None})
    bench = _Bench(plan, listener, Measured(versions=installed(("torch", "numpy", "transformers"))))
    listener.total(_steps_ahead(plan, len(systems), len({PLAIN, "ngram", shipped})))
    if plan.batches or "W3" in plan.cases:
        with bench.running(policy, systems) as workers:
            for batch in plan.batches:
                bench.problems(workers, "", batch, list(drafters), shipped)
            if "W3" in plan.cases:
                bench.search(workers, [("ngram", "sibling-ngram"), (shipped, "controller")])
    if "policy-large" in plan.cases:
        systems = {name: ("guessing", dict(options)) for name, options in _LARGE.items()}
        with bench.running(BUNDLED / "policy-large", systems) as workers:
            for batch in LARGE_BATCHES:
                bench.problems(workers, "policy-large ", batch, ("draft_model", "ngram"), "draft_model")
    if "250M" in plan.cases:
        # Enough for the largest batch, and little beside the weights of two processes.
        options = {"draft": "off", "kv_tokens": 8192}
        both = {PLAIN: ("guessing", options), "simulated": ("guessing", options)}
        with bench.running(checkpoint("250M", plan.large, plan.cache), both) as workers:
            for batch in plan.work.tokens:
                bench.simulated(workers, batch)
    return bench.measured


@dataclass(frozen=True, slots=True)
class _Bench:
    """The cases; results go to ``measured``."""

    plan: SpeculationPlan
    listener: Listener
    measured: Measured

    @contextmanager
    def running(self, folder: Path, systems: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Worker]]:
        """A worker for each system, with the checkpoint loaded."""
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-bench-")))
            workers = {
                name: stack.enter_context(
                    Worker(
                        module,
                        folder,
                        threads=self.plan.threads,
                        log=logs / f"{name.replace(' ', '-')}.log",
                        options=options,
                        name=name,
                    )
                )
                for name, (module, options) in systems.items()
            }
            for name, worker in workers.items():
                self.listener.step(f"{folder.name}: {name} loads")
                worker.ready()
            if not self.measured.ceilings:
                self.measured.ceilings = workers[PLAIN].call("ceilings")
            yield workers

    def problems(
        self, workers: Mapping[str, Worker], model: str, batch: int, drafters: Sequence[str], shipped: str
    ) -> None:
        """Each drafter on problems, ``batch`` at a time. ``model``: how its cases' names begin."""
        names = [name for name in workers if batch == 1 or name not in (ASSISTED, LOOKUP)]
        seen: dict[str, list[Solved]] = {name: [] for name in names}
        for turn in range(-1, self.plan.rounds):
            seed = _seed("batch", batch, turn)
            prompts = self._prompts(workers[PLAIN], suites.SUITES, self.plan.work.problems[batch], _SOLUTION)
            truth: list[list[int]] = []
            for name in names:
                self._say_next(f"{model}batch {batch}", turn, name)
                solved = _call(workers[name], "solve", prompts, batch=batch, seed=seed)
                truth = truth or solved.texts
                if name not in (ASSISTED, LOOKUP):
                    _compare(name, solved.texts, truth)
                if turn >= 0:
                    seen[name].append(solved)
        for name in drafters:
            case = f"{model}batch {batch} {name}"
            self._add(case, seen[name], PLAIN, seen[PLAIN])
            if ASSISTED in seen:
                self._add_speed(case, seen[name], ASSISTED, seen[LOOKUP if name == "ngram" else ASSISTED])
        self._add(f"{model}batch {batch} controller", seen[shipped], PLAIN, seen[PLAIN])
        if ALWAYS in seen:
            self._add_speed(f"{model}batch {batch} controller", seen[shipped], ALWAYS, seen[ALWAYS])

    def search(self, workers: Mapping[str, Worker], drafters: Sequence[tuple[str, str]]) -> None:
        """W3 on Countdown problems, one after the other. ``drafters``: with what their cases are called."""
        seen: dict[str, list[Solved]] = {name: [] for name in (PLAIN, *(name for name, _ in drafters))}
        for turn in range(-1, self.plan.rounds):
            seed = _seed("W3", 0, turn)
            prompts = self._prompts(workers[PLAIN], ("countdown",), self.plan.work.searches, _STEP)
            truth: list[list[int]] = []
            for name in seen:
                self._say_next("W3", turn, name)
                solved = _call(workers[name], "search", prompts, seed=seed)
                truth = truth or solved.texts
                _compare(name, solved.texts, truth)
                if turn >= 0:
                    seen[name].append(solved)
        for name, called in drafters:
            self._add(f"W3 {called}", seen[name], PLAIN, seen[PLAIN])
            hits, plain = (
                100 * _median(each, lambda one: one.cached / one.prompt) for each in (seen[name], seen[PLAIN])
            )
            self.measured.rows.append(Row(f"W3 {called}", "cache hit rate", "%", hits, PLAIN, plain, hits / plain))

    def simulated(self, workers: Mapping[str, Worker], batch: int) -> None:
        """Guesses that are right so often, on the large model."""
        seen: dict[float, list[Solved]] = {right: [] for right in self.plan.right}
        plain: list[Solved] = []
        for turn in range(-1, self.plan.rounds):
            seed = _seed("250M", batch, turn)
            noise = Random(seed)
            prompts = [
                Prompt(tuple(noise.choices(VOCAB, k=32)), 1.0, self.plan.work.tokens[batch], False)
                for _ in range(batch)
            ]
            self._say_next(f"250M batch {batch}", turn, PLAIN)
            known = _call(workers[PLAIN], "solve", prompts, batch=batch, seed=seed)
            for right in self.plan.right:
                self._say_next(f"250M batch {batch}", turn, f"{right:.0%} right")
                workers["simulated"].call("imitate", texts=known.texts, right=right)
                solved = _call(workers["simulated"], "solve", prompts, batch=batch, seed=seed)
                _compare("simulated", solved.texts, known.texts)
                if turn >= 0:
                    seen[right].append(solved)
            if turn >= 0:
                plain.append(known)
        for right, each in seen.items():
            self._add(f"250M {right} batch {batch}", each, PLAIN, plain)

    def _prompts(self, worker: Worker, names: Sequence[str], count: int, tokens: int) -> list[Prompt]:
        """Held-out problems, the suites in turn, each at its temperature."""
        most = max(*self.plan.work.problems.values(), 2 * self.plan.work.searches)
        drawn = [_held_out(name, most // 2) for name in names]
        return [
            Prompt(
                tuple(worker.call("tokenize", problem=problem.text)),
                suites.family(problem.suite).TEMPERATURE,
                tokens,
                True,
            )
            for problem in [one for turn in zip(*drawn, strict=True) for one in turn][:count]
        ]

    def _add(self, case: str, ours: Sequence[Solved], peer: str, theirs: Sequence[Solved]) -> None:
        """Speed, guesses that were right, and what a step brings."""
        self._add_speed(case, ours, peer, theirs)
        right = 100 * _median(ours, lambda one: one.accepted / max(1, one.drafted))
        self.measured.rows.append(Row(case, "accepted guesses", "%", right, "all guesses", 100.0, right / 100))
        tokens = _median(ours, lambda one: one.tokens / (one.tokens - one.accepted))
        self.measured.rows.append(Row(case, "tokens per branch and step", "tokens", tokens, peer, 1.0, tokens))
        speed, least = (_median(each, lambda one: one.tokens / one.seconds) for each in (ours, theirs))
        self.listener.say(
            f"{case:24} {speed:8.1f} tokens/s, {speed / least:.2f}× {peer}; {right:.0f} % of guesses right, "
            f"{tokens:.2f} tokens per branch and step"
        )

    def _add_speed(self, case: str, ours: Sequence[Solved], peer: str, theirs: Sequence[Solved]) -> None:
        runs = {"ours": [one.tokens / one.seconds for one in ours], peer: [one.tokens / one.seconds for one in theirs]}
        self.measured.runs.setdefault(case, {}).update(runs)
        speed, other = (statistics.median(values) for values in runs.values())
        self.measured.rows.append(Row(case, "generated tokens", "tokens/s", speed, peer, other, speed / other))

    def _say_next(self, case: str, turn: int, name: str) -> None:
        what = "warm-up" if turn < 0 else f"round {turn + 1}/{self.plan.rounds}"
        self.listener.step(f"{case} {what}: {name}")


def _drafters(plan: SpeculationPlan) -> tuple[dict[str, str], str]:
    """Drafters of the bundled policy by kind, and which of them it uses unless told otherwise."""
    drafters = {"draft_model": f"draft_model={BUNDLED / 'draft'}", "ngram": "ngram"}
    shipped = BUNDLED / "policy" / "drafter"
    heads = [Path(folder) for folder in plan.heads]
    if shipped.is_dir():
        heads.append(shipped)
    for folder in heads:
        drafters[_kind(folder)] = f"{_kind(folder)}={folder.absolute()}"
    return drafters, _kind(shipped) if shipped.is_dir() else "ngram"


def _kind(folder: Path) -> str:
    try:
        kind = json.loads((folder / "config.json").read_text())["kind"]
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"{folder} holds no drafting head: {error!r}") from None
    return str(kind)


@cache
def _held_out(suite: str, count: int) -> list[suites.Problem]:
    """Drawn once: word problems take their time."""
    return suites.load(suite, limit=count)


def _call(worker: Worker, name: str, prompts: Sequence[Prompt], **arguments: Any) -> Solved:
    return Solved(**worker.call(name, prompts=[asdict(prompt) for prompt in prompts], **arguments))


def _compare(name: str, texts: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> None:
    """Steps of another shape round otherwise, by a millionth of a logit; that tips a draw now and then, not often."""
    other = sum(ours != plain for ours, plain in zip(texts, truth, strict=True))
    if other > 1 + len(truth) // 50:
        raise BenchError(f"{name} answers {other} of {len(truth)} prompts otherwise than plain decoding")


def _median(each: Sequence[Solved], value: Callable[[Solved], float]) -> float:
    return statistics.median(value(one) for one in each)


def _steps_ahead(plan: SpeculationPlan, systems: int, searching: int) -> int:
    """How often ``measure`` says what comes next."""
    assisted = 2 if 1 in plan.batches else 0
    loads = systems if plan.batches or "W3" in plan.cases else 0
    runs = sum(systems if batch == 1 else systems - assisted for batch in plan.batches)
    if "W3" in plan.cases:
        runs += searching
    if "policy-large" in plan.cases:
        loads += len(_LARGE)
        runs += len(_LARGE) * len(LARGE_BATCHES)
    if "250M" in plan.cases:
        loads += 2
        runs += len(plan.work.tokens) * (1 + len(plan.right))
    return loads + runs * (plan.rounds + 1)


def _seed(case: str, batch: int, turn: int) -> int:
    """Noise of its own for every case and turn, the same for all systems."""
    return zlib.crc32(f"speculation {case} {batch} {turn}".encode())
