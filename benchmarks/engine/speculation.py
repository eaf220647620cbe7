"""Speculative decoding compared with plain decoding: every drafter on real problems, simulated drafters on a large
model, and a tree search. Runs take turns, and speculative ones must give the tokens of plain decoding.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import reasoner
from benchmarks.engine.checkpoint import SIZES, Size, cache_folder, checkpoint
from benchmarks.engine.measure import Listener, Measured, Row
from benchmarks.engine.problems import ALWAYS, PLAIN, SHORT, SPECULATIVE, Prompt, Solved
from benchmarks.engine.process import BenchError, Worker, installed
from benchmarks.engine.running import Systems
from benchmarks.engine.widened import widened
from benchmarks.engine.workloads import VOCAB
from reasoner.evaluation.suites import registry
from reasoner.evaluation.suites.problem import Problem

BATCHES = (1, 4, 16, 64)
CASES = (*(f"batch-{batch}" for batch in BATCHES), "thoughts", "policy-large", "250M", "W3", "policy-250M")
"""``batch-N``: problems, N at a time, with the bundled policy; ``thoughts``: best of 16 with the bundled thinking
policy, one problem after the other, beside shorter n-grams too; ``policy-large``: ``batch-N`` with the larger model;
``250M``: simulated drafters on a large model; ``W3`` and ``policy-250M``: a tree search with the policy, and with the
policy at the cost of a large model.
"""
LARGE_BATCHES = (1, 4)
WIDE = Size(hidden=1024, layers=20, heads=32, kv_heads=16, head_dim=32, intermediate=3072, vocab=826, context=512)
"""Size of the widened policy, 250 million parameters."""
ASSISTED, LOOKUP = "transformers-assisted", "transformers-lookup"
BUNDLED = Path(reasoner.__file__).parent / "bundled"
_LARGE = {"draft_model": {"draft": "auto"}, "ngram": {"draft": "ngram"}}
"""Options for the larger bundled model, by drafter."""
_PAIRS = 3
"""Number of pairs of runs in a round, where a run takes about a second."""
_MORE = 2
"""Number of additional warm-up runs of simulated drafters."""
_SOLUTION, _STEP, _SIBLINGS = 256, 32, 16
"""Maximum tokens of a solution and of a step of the tree search, and number of branches of each thinking problem."""


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work in one run."""

    problems: Mapping[int, int] = field(default_factory=lambda: {1: 96, 4: 256, 16: 512, 64: 768})
    """Number of problems by batch size."""
    tokens: Mapping[int, int] = field(default_factory=lambda: {1: 256, 4: 192, 16: 128, 64: 96})
    """Number of tokens of each sequence of the large model, by batch size. A controller learns from steps, of which
    there are as many as tokens without draft tokens.
    """
    thoughts: int = 4
    """Number of thinking problems."""
    thought_tokens: int = 1400
    """Maximum tokens of a thought with its answer."""
    searches: int = 16
    wide_searches: int = 6
    """Number of searches with the widened policy."""
    warm_up: int = 12
    """Number of untimed turns of searches."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """Settings of a run."""

    cases: tuple[str, ...] = CASES
    heads: tuple[str, ...] = ()
    """Folders of draft heads for the bundled policy, beside its bundled drafter."""
    rounds: int = 3
    threads: int = 1
    large: Size = SIZES["250M"]
    wide: Size = WIDE
    right: tuple[float, ...] = (0.6, 0.8, 0.9)
    """Acceptance rates of simulated drafters."""
    work: Work = field(default_factory=Work)
    cache: Path = field(default_factory=cache_folder)
    """Folder of the large checkpoints."""

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of problems."""
        return tuple(batch for batch in BATCHES if f"batch-{batch}" in self.cases)


def measure(plan: SpeculationPlan, listener: Listener) -> Measured:
    """Run the plan; a peer that fails is left out from there on. Raises ``BenchError`` if our engine fails, or if its
    tokens differ from plain decoding.
    """
    policy = BUNDLED / "policy"
    drafters, shipped = _drafters(plan)
    systems: dict[str, tuple[str, dict[str, Any]]] = {
        name: ("speculative", {"draft": draft} | ({"always": 4} if name == shipped else {}))
        for name, draft in drafters.items()
    }
    if 1 in plan.batches:
        systems[ASSISTED] = (ASSISTED, {"assistant": str(BUNDLED / "draft")})
        systems[LOOKUP] = (ASSISTED, {"assistant": None})
    bench = _Bench(plan, listener, Measured(versions=installed(("torch", "numpy", "transformers"))))
    listener.total(_steps_ahead(plan, len(drafters), len({"ngram", shipped})))
    if plan.batches or "W3" in plan.cases:
        with bench.running(policy, systems) as running:
            for batch in plan.batches:
                bench.problems(running, "", batch, list(drafters), shipped)
            if "W3" in plan.cases:
                bench.search(running.workers, "", plan.work.searches, shipped)
    if "thoughts" in plan.cases:
        systems = {"ngram": ("speculative", {"draft": "ngram"})}
        with bench.running(BUNDLED / "policy-thinking", systems) as running:
            bench.thoughts(running.workers["ngram"])
    if "policy-large" in plan.cases:
        systems = {name: ("speculative", dict(options)) for name, options in _LARGE.items()}
        with bench.running(BUNDLED / "policy-large", systems) as running:
            for batch in LARGE_BATCHES:
                bench.problems(running, "policy-large ", batch, ("draft_model", "ngram"), "draft_model")
    if "250M" in plan.cases:
        # Enough for the largest batch, and small beside the weights.
        only = {"simulated": ("speculative", {"draft": "off", "kv_tokens": 16384})}
        with bench.running(checkpoint("250M", plan.large, plan.cache), only) as running:
            for batch in plan.work.tokens:
                bench.simulated(running.workers["simulated"], batch)
    if "policy-250M" in plan.cases:
        systems = {name: ("speculative", {"draft": drafters[name], "kv_tokens": 16384}) for name in ("ngram", shipped)}
        with bench.running(widened("policy-250M", policy, plan.wide, plan.cache), systems) as running:
            bench.search(running.workers, "policy-250M ", plan.work.wide_searches, shipped)
    return bench.measured


_Runs = dict[str, list[Solved]]
"""Runs of one system by way."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """The benchmark's cases; results are added to ``measured``."""

    plan: SpeculationPlan
    listener: Listener
    measured: Measured

    @contextmanager
    def running(self, folder: Path, systems: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[Systems]:
        """Yield a worker for each system, with the checkpoint loaded."""
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reasoner-bench-")))
            running = stack.enter_context(Systems((ASSISTED, LOOKUP), self.listener.say, self.measured.left_out))
            for name, (module, options) in systems.items():
                log = logs / f"{name.replace(' ', '-')}.log"
                start = partial(Worker, module, folder, threads=self.plan.threads, log=log, options=options, name=name)
                running.start(name, f"{folder.name} starts", start)

            def load(name: str, worker: Worker) -> None:
                self.listener.step(f"{folder.name}: {name} loads")
                worker.ready()

            running.run_each(f"{folder.name} loads", load)
            if not self.measured.ceilings:
                self.measured.ceilings = next(iter(running.workers.values())).call("ceilings")
            yield running

    def problems(self, systems: Systems, model: str, batch: int, drafters: Sequence[str], shipped: str) -> None:
        """Run each drafter on problems, ``batch`` at a time. ``model``: prefix of the cases' names."""
        runs: dict[str, _Runs] = {name: {PLAIN: [], SPECULATIVE: []} for name in drafters}
        if not model:
            runs[shipped][ALWAYS] = []
        workers = systems.workers
        peers: dict[str, list[Solved]] = {name: [] for name in (ASSISTED, LOOKUP) if batch == 1}
        for turn in range(-1, _PAIRS * self.plan.rounds):
            seed = _seed("batch", batch, turn)
            count = self.plan.work.problems[batch]
            prompts = self._prompts(workers[shipped], registry.POLICY_SUITES, count, _SOLUTION, turn)
            for name, ways in runs.items():
                run = partial(_call, workers[name], "solve", prompts, seed=seed, batch=batch)
                self._take_turns(f"{model}batch {batch}", name, turn, ways, run, turned=turn % 2 == 1)
            for name in [name for name in peers if name in workers] if turn < self.plan.rounds else ():
                stage = self._say_next(f"{model}batch {batch}", turn, name)
                with systems.allow_failure(name, stage):
                    _keep(peers[name], turn, _call(workers[name], "solve", prompts, seed=seed, batch=batch))
        for name, ways in runs.items():
            case = f"{model}batch {batch} {name}"
            self._add(case, ways)
            peer = LOOKUP if name == "ngram" else ASSISTED
            if peer in peers and peer in workers:
                self._add_speed(case, ways[SPECULATIVE], ASSISTED, peers[peer])
        case, ways = f"{model}batch {batch} controller", runs[shipped]
        self._add(case, ways)
        if ALWAYS in ways:
            self._add_pairs(case, ways[SPECULATIVE], ALWAYS, ways[ALWAYS])

    def thoughts(self, worker: Worker) -> None:
        """Run best of 16 of the thinking policy, with n-grams of all lengths, short ones, and none."""
        ways: _Runs = {PLAIN: [], SPECULATIVE: [], SHORT: []}
        for turn in range(-1, _PAIRS * self.plan.rounds):
            prompts = self._prompts(
                worker, ("countdown",), self.plan.work.thoughts, self.plan.work.thought_tokens, turn
            )
            run = partial(_call, worker, "best_of", prompts, seed=_seed("thoughts", 0, turn), branches=_SIBLINGS)
            self._take_turns("thoughts", "ngram", turn, ways, run, turned=turn % 2 == 1)
        self._add("thoughts ngram", ways)
        self._add_pairs("thoughts ngram", ways[SPECULATIVE], SHORT, ways[SHORT])
        for way in (SPECULATIVE, SHORT):
            ratio = statistics.median(
                _speed(ours) / _speed(plain) for ours, plain in zip(ways[way], ways[PLAIN], strict=True)
            )
            self.listener.say(f"thoughts, {way}: {ratio:.2f}× {PLAIN}")

    def search(self, workers: Mapping[str, Worker], model: str, searches: int, shipped: str) -> None:
        """Run W3 on Countdown problems, one after the other, with n-grams and with the ``shipped`` drafter. Each turn
        has its own problems, so drafters cannot have learned them in earlier turns. ``model``: prefix of the cases'
        names.
        """
        runs: dict[str, _Runs] = {name: {PLAIN: [], SPECULATIVE: []} for name in ("ngram", shipped)}
        for turn in range(-self.plan.work.warm_up, _PAIRS * self.plan.rounds):
            seed = _seed("W3", 0, turn)
            prompts = self._prompts(workers["ngram"], ("countdown",), searches, _STEP, turn)
            for name, ways in runs.items():
                run = partial(_call, workers[name], "search", prompts, seed=seed)
                if turn < -1:
                    self._say_next(f"{model}W3", turn, name)
                    run(SPECULATIVE)
                else:
                    self._take_turns(f"{model}W3", name, turn, ways, run, turned=turn % 2 == 1)
        for name, called in (("ngram", "sibling-ngram"), (shipped, "controller")):
            case = f"{model}W3 {called}"
            self._add(case, runs[name])
            hits, plain = (
                100 * _median(runs[name][way], lambda one: one.cached / one.prompt) for way in (SPECULATIVE, PLAIN)
            )
            self.measured.rows.append(Row(case, "cache hit rate", "%", hits, PLAIN, plain, hits / plain))

    def simulated(self, worker: Worker, batch: int) -> None:
        """Run simulated drafters of given acceptance rates on the large model."""
        runs: dict[float, _Runs] = {right: {PLAIN: [], SPECULATIVE: []} for right in self.plan.right}
        for turn in range(-1, self.plan.rounds):
            seed = _seed("250M", batch, turn)
            noise = Random(seed)
            prompts = [
                Prompt(tuple(noise.choices(VOCAB, k=32)), 1.0, self.plan.work.tokens[batch], False)
                for _ in range(batch)
            ]
            for right, ways in runs.items():
                run = partial(_imitated, worker, right, prompts, seed=seed, batch=batch)
                self._take_turns(f"250M batch {batch}", f"{right:.0%} right", turn, ways, run)
                for _ in range(_MORE if turn < 0 else 0):
                    self._say_next(f"250M batch {batch}", turn, f"{right:.0%} right")
                    run(SPECULATIVE)
        for right, ways in runs.items():
            self._add(f"250M {right} batch {batch}", ways)

    def _take_turns(
        self, case: str, name: str, turn: int, ways: _Runs, run: Callable[[str], Solved], *, turned: bool = False
    ) -> None:
        """Run a system in each of its ways, one after another, in reverse order if ``turned``. All must give the same
        tokens.
        """
        found: dict[str, Solved] = {}
        for way in reversed(ways) if turned else ways:
            self._say_next(case, turn, f"{name}, {way}")
            found[way] = run(way)
        for way, solved in found.items():
            _compare(f"{name}, {way},", solved.texts, found[PLAIN].texts)
            _keep(ways[way], turn, solved)

    def _prompts(self, worker: Worker, names: Sequence[str], count: int, tokens: int, turn: int) -> list[Prompt]:
        """Return held-out problems, the suites in turn, each at its temperature. Turns have different problems until
        all have been used.
        """
        work = self.plan.work
        most = max(*work.problems.values(), 2 * (work.warm_up + _PAIRS * self.plan.rounds) * work.searches)
        drawn = [_held_out(name, most // 2) for name in names]
        ordered = [one for some in zip(*drawn, strict=True) for one in some]
        first = turn % (len(ordered) // count) * count
        return [
            Prompt(
                tuple(worker.call("tokenize", problem=problem.text)),
                registry.get_family(problem.suite).TEMPERATURE,
                tokens,
                True,
            )
            for problem in ordered[first : first + count]
        ]

    def _add(self, case: str, ways: _Runs) -> None:
        """Add rows for the speed against plain decoding, the acceptance rate, and the tokens per step."""
        ours = ways[SPECULATIVE]
        ratio = self._add_pairs(case, ours, PLAIN, ways[PLAIN])
        right = 100 * _median(ours, lambda one: one.accepted / max(1, one.drafted))
        self.measured.rows.append(
            Row(case, "accepted draft tokens", "%", right, "all draft tokens", 100.0, right / 100)
        )
        tokens = _median(ours, lambda one: one.tokens / (one.tokens - one.accepted))
        self.measured.rows.append(Row(case, "tokens per branch and step", "tokens", tokens, PLAIN, 1.0, tokens))
        self.listener.say(
            f"{case:24} {ratio:.2f}× {PLAIN}; {right:.0f} % accepted, {tokens:.2f} tokens per branch and step"
        )

    def _add_pairs(self, case: str, ours: Sequence[Solved], peer: str, theirs: Sequence[Solved]) -> float:
        """Add a row for runs in pairs and return its ratio, the median over all pairs. The peer's speed is our median
        divided by it.
        """
        ratio = statistics.median(_speed(one) / _speed(other) for one, other in zip(ours, theirs, strict=True))
        self._add_speed(case, ours, peer, theirs, _median(ours, _speed) / ratio)
        return ratio

    def _add_speed(
        self, case: str, ours: Sequence[Solved], peer: str, theirs: Sequence[Solved], other: float | None = None
    ) -> None:
        """Add a row for our median speed and a peer's median, or the speed ``other``."""
        runs = {"ours": [_speed(one) for one in ours], peer: [_speed(one) for one in theirs]}
        self.measured.runs.setdefault(case, {}).update(runs)
        speed, other = _median(ours, _speed), other or _median(theirs, _speed)
        self.measured.rows.append(Row(case, "generated tokens", "tokens/s", speed, peer, other, speed / other))

    def _say_next(self, case: str, turn: int, name: str) -> str:
        """Take the next progress step, and return the case and the turn."""
        stage = f"{case} {'warm-up' if turn < 0 else f'turn {turn + 1}'}"
        self.listener.step(f"{stage}: {name}")
        return stage


def _drafters(plan: SpeculationPlan) -> tuple[dict[str, str], str]:
    """Return the drafters of the bundled policy by kind, and the kind that it uses by default."""
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
def _held_out(suite: str, count: int) -> list[Problem]:
    """Return held-out problems; cached, since word problems are slow to create."""
    return registry.load_problems(suite, limit=count)


def _call(worker: Worker, name: str, prompts: Sequence[Prompt], way: str | None = None, **arguments: Any) -> Solved:
    arguments |= {} if way is None else {"way": way}
    return Solved(**worker.call(name, prompts=[asdict(prompt) for prompt in prompts], **arguments))


def _imitated(worker: Worker, right: float, prompts: Sequence[Prompt], way: str, **arguments: Any) -> Solved:
    """Run the prompts; a plain run's tokens become the texts of the simulated drafter."""
    solved = _call(worker, "solve", prompts, way, **arguments)
    if way == PLAIN:
        worker.call("imitate", texts=solved.texts, right=right)
    return solved


def _compare(name: str, texts: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> None:
    """Raise ``BenchError`` if too many texts differ. A few may: steps of another shape round logits differently by
    about a millionth, which rarely changes a sampled token.
    """
    other = sum(ours != plain for ours, plain in zip(texts, truth, strict=True))
    if other > 1 + len(truth) // 50:
        raise BenchError(f"{name} answers {other} of {len(truth)} prompts otherwise than plain decoding")


def _keep(runs: list[Solved], turn: int, solved: Solved) -> None:
    """Keep the run unless its turn is for warm-up."""
    if turn >= 0:
        runs.append(solved)


def _speed(one: Solved) -> float:
    return one.tokens / one.seconds


def _median(each: Sequence[Solved], value: Callable[[Solved], float]) -> float:
    return statistics.median(value(one) for one in each)


def _steps_ahead(plan: SpeculationPlan, drafters: int, searching: int) -> int:
    """Return the number of progress steps of ``measure``."""
    turns = _PAIRS * plan.rounds + 1
    assisted = 2 if 1 in plan.batches else 0
    steps = drafters + assisted if plan.batches or "W3" in plan.cases else 0
    steps += len(plan.batches) * turns * (2 * drafters + 1) + assisted * (plan.rounds + 1)
    for case, loads in (("W3", 0), ("policy-250M", searching)):
        if case in plan.cases:
            steps += loads + (plan.work.warm_up - 1 + (_PAIRS * plan.rounds + 1) * 2) * searching
    if "thoughts" in plan.cases:
        steps += 1 + 3 * turns
    if "policy-large" in plan.cases:
        steps += len(_LARGE) * (1 + len(LARGE_BATCHES) * turns * 2)
    if "250M" in plan.cases:
        steps += 1 + len(plan.work.tokens) * ((plan.rounds + 1) * 2 + _MORE) * len(plan.right)
    return steps


def _seed(case: str, batch: int, turn: int) -> int:
    """Return a seed for every case and turn, the same for all systems."""
    return zlib.crc32(f"speculation {case} {batch} {turn}".encode())
