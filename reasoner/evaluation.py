"""Accuracy against compute: runs strategies on a suite and counts what each answer cost.

A pool of samples is a journal. Voting and picking the best are different decisions on the same samples, so each pool is
sampled and scored once, live, by ``best_of_n``, and the other strategies of the pool replay its journal: the same code
that a job runs, the same bill, nothing generated twice. Tree searches run live. Before each pool and each tree search
the engine's cache is emptied, so that every case pays for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.types import EngineClient
from reasoner.jobs import JobSpec, StrategySpec
from reasoner.journal import Entry, MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.suites import Problem, check

POOLED: dict[str, tuple[str, ...]] = {
    "self_consistency": ("node",),
    "best_of_n": ("node", "score"),
    "weighted_vote": ("node", "score"),
}
"""Strategies that decide on a pool of independent samples, with the journal entries that each of them has."""


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy's answer to one problem. ``found`` says whether any candidate passes the suite's rule, which is what
    the search reaches when the rule itself picks among its candidates; ``samples`` and ``right`` count them."""

    strategy: str
    n: int
    problem: str
    correct: bool
    found: bool
    samples: int
    right: int
    tokens: int
    verifier_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: every strategy at every ``n`` (greedy has only one)."""

    strategies: tuple[str, ...]
    ns: tuple[int, ...]
    seed: int = 0
    temperature: float = 1.0
    concurrency: int = 8

    def stages(self) -> list[tuple[str, int, tuple[str, ...]]]:
        """(strategy to run live, n, strategies to report), one for each time that the cache is emptied."""
        stages: list[tuple[str, int, tuple[str, ...]]] = []
        if "greedy" in self.strategies:
            stages.append(("greedy", 1, ("greedy",)))
        pooled = tuple(name for name in self.strategies if name in POOLED)
        for n in self.ns:
            if pooled:
                live = "best_of_n" if any("score" in POOLED[name] for name in pooled) else "self_consistency"
                stages.append((live, n, pooled))
        for name in self.strategies:
            if name not in POOLED and name != "greedy":
                stages += [(name, n, (name,)) for n in self.ns]
        return stages


async def evaluate(
    problems: Sequence[Problem], plan: Plan, engine: EngineClient, progress: Callable[[str, int], None]
) -> list[Run]:
    """Runs the plan; ``progress(stage, done)`` is called after each problem. Raises the engine's errors."""
    runs: list[Run] = []
    for live, n, reported in plan.stages():
        await engine.clear_cache()
        slots = asyncio.Semaphore(plan.concurrency)
        done = 0

        async def one(
            problem: Problem,
            live: str = live,
            n: int = n,
            reported: tuple[str, ...] = reported,
            slots: asyncio.Semaphore = slots,
        ) -> list[Run]:
            nonlocal done
            async with slots:
                found = await _run(problem, live, n, reported, plan, engine)
            done += 1
            progress(f"{live} n={n}", done)
            return found

        for found in await asyncio.gather(*(one(problem) for problem in problems)):
            runs += found
    return runs


async def _run(
    problem: Problem, live: str, n: int, reported: Iterable[str], plan: Plan, engine: EngineClient
) -> list[Run]:
    journal = MemoryJournal()
    lived = await run_job(_spec(problem, live, n, plan), engine, journal)
    runs = []
    for name in reported:
        outcome = lived
        if name != live:
            pool = MemoryJournal(_only(journal.entries, POOLED[name]))
            outcome = await run_job(_spec(problem, name, n, plan), engine, pool)
        runs.append(_judge(problem, name, n, outcome, journal.entries))
    return runs


def _spec(problem: Problem, strategy: str, n: int, plan: Plan) -> JobSpec:
    params = {} if strategy == "greedy" else {"n": n}
    return JobSpec(
        problem=problem.text,
        strategy=StrategySpec.model_validate({"name": strategy} | params),
        sampling={"temperature": plan.temperature},
        answer="text",
        seed=plan.seed,
    )


def _only(entries: Sequence[Entry], types: tuple[str, ...]) -> list[Entry]:
    """The journal of a search that asked for nothing but these types of answers, with its own clock."""
    kept, elapsed = [], 0.0
    for entry in entries:
        if entry.type in types:
            elapsed += entry.spend.seconds
            kept.append(Entry(entry.key, entry.type, entry.data, entry.spend, elapsed))
    return kept


def _judge(problem: Problem, name: str, n: int, outcome: JobOutcome, entries: Sequence[Entry]) -> Run:
    leaves = [
        entry.data["answer"]
        for entry in entries
        if entry.type == "node" and entry.data["final"] and entry.data["reason"] != "step"
    ]
    right = sum(check(problem, answer) for answer in leaves)
    usage = outcome.usage
    return Run(
        strategy=name,
        n=n,
        problem=problem.id,
        correct=check(problem, outcome.result.answer),
        found=right > 0,
        samples=len(leaves),
        right=right,
        tokens=usage.generated,
        verifier_tokens=usage.verifier_computed,
        seconds=usage.seconds,
    )
