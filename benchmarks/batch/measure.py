"""Run the same problems twice with the same tokens: each problem with an even share of its own, or all with one budget.

A problem has the same seed in both, so it samples the same solutions, only more or fewer of them. The engine's cache is
emptied before each run, because tokens computed by the verifier are billed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.batch.shared_budget import SharedBudget
from engine.protocol.types import EngineClient
from reasoner.admission.resolve import resolve_program_job
from reasoner.answers.spec import AnswerSpec
from reasoner.budget.allocator import MAX_ACTIVE_JOBS, TokenRequest
from reasoner.budget.grant_source import GrantSource
from reasoner.budget.spec import Budget
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import POLICY_SUITES, check_answer, get_family, load_problems
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.spec import StrategySpec
from reasoner.run import run_job

Way = Literal["even", "shared"]
WAYS: tuple[Way, ...] = ("even", "shared")
STRATEGY = {"name": "weighted_vote", "n": 64}


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of the benchmark. ``tokens``: budgets, per problem on average."""

    problems: int
    tokens: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def runs(self) -> int:
        """Number of searches."""
        return self.problems * len(self.tokens) * len(self.seeds) * 2


@dataclass(frozen=True, slots=True)
class Solved:
    """Result of one problem in one run."""

    way: Way
    tokens: int
    seed: int
    suite: str
    problem: str
    correct: bool
    spent: int


def mixed(count: int) -> list[Problem]:
    """Return held-out problems, the suites in turn."""
    each = [load_problems(name, limit=-(-count // len(POLICY_SUITES))) for name in POLICY_SUITES]
    return [problem for group in zip(*each, strict=True) for problem in group][:count]


async def measure(plan: Plan, engine: EngineClient, done: Callable[[str], None]) -> list[Solved]:
    """Run the plan; ``done(what)`` is called after each search. Raises the engine's errors."""
    problems = mixed(plan.problems)
    found: list[Solved] = []
    for tokens in plan.tokens:
        for seed in plan.seeds:
            for way in WAYS:
                await engine.clear_cache()
                found += await _run(way, tokens, seed, problems, engine, done)
    return found


async def _run(
    way: Way, tokens: int, seed: int, problems: Sequence[Problem], engine: EngineClient, done: Callable[[str], None]
) -> list[Solved]:
    slots = asyncio.Semaphore(MAX_ACTIVE_JOBS)
    names = [str(number) for number in range(len(problems))]
    shared = SharedBudget(tokens * len(problems), names) if way == "shared" else None

    async def one(problem: Problem, name: str) -> Solved:
        budget = Budget(tokens=tokens) if shared is None else Budget()
        grant_source = None if shared is None else _Polite(shared.member(name), slots)
        request = JobRequest(
            problem=problem.text,
            strategy=StrategySpec.model_validate(STRATEGY),
            budget=budget,
            sampling=Sampling(temperature=get_family(problem.suite).TEMPERATURE),
            answer=AnswerSpec(compare="text", instruct=False),
            seed=seed,
        )
        async with slots:
            outcome = await run_job(resolve_program_job(request), engine, MemoryJournal(grant_source=grant_source))
        if shared is not None:
            shared.end(name, outcome.usage.total)
        done(f"{tokens} tokens, {way}")
        right = check_answer(problem, outcome.result.answer)
        return Solved(way, tokens, seed, problem.suite, problem.id, right, outcome.usage.total)

    return await asyncio.gather(*(one(*pair) for pair in zip(problems, names, strict=True)))


class _Polite:
    """Grant source that gives its slot to another search while it waits for tokens."""

    def __init__(self, grant_source: GrantSource, slots: asyncio.Semaphore) -> None:
        self._grant_source = grant_source
        self._slots = slots

    async def request_tokens(self, granted: int, ask: TokenRequest) -> int:
        """Implement ``GrantSource``."""
        self._slots.release()
        try:
            return await self._grant_source.request_tokens(granted, ask)
        finally:
            await self._slots.acquire()
