"""The evaluation: pools of samples as journals, judged by the suite's own rule."""

from __future__ import annotations

import pytest

from reasoner.evaluation import Plan, Run, evaluate
from reasoner.jobs import JobSpec
from reasoner.journal import MemoryJournal
from reasoner.run import run_job
from reasoner.suites import load
from tests.scripted import ScriptedEngine

PROBLEMS = load("words", limit=5)


async def measure(plan: Plan, engine: ScriptedEngine) -> list[Run]:
    return await evaluate(PROBLEMS, plan, engine, lambda stage, done: None)


async def test_every_strategy_of_a_pool_decides_as_it_does_alone_and_nothing_is_generated_twice() -> None:
    plan = Plan(("self_consistency", "best_of_n", "weighted_vote"), (8,), seed=3)
    engine = ScriptedEngine()
    runs = await measure(plan, engine)
    by_case = {(run.strategy, run.problem): run for run in runs}
    assert len(runs) == len(by_case) == 15
    assert engine.total == sum(run.tokens + run.verifier_tokens for run in runs if run.strategy == "best_of_n")
    for problem in PROBLEMS:
        pooled = {name: by_case[name, problem.id] for name in plan.strategies}
        assert pooled["self_consistency"].tokens == pooled["best_of_n"].tokens
        assert pooled["self_consistency"].verifier_tokens == 0 < pooled["best_of_n"].verifier_tokens
        for name, run in pooled.items():
            spec = JobSpec.model_validate(
                {"problem": problem.text, "strategy": {"name": name, "n": 8}, "seed": 3, "answer": "text"}
            )
            alone = await run_job(spec, ScriptedEngine(), MemoryJournal())
            assert alone.usage.generated == run.tokens
            assert alone.usage.verifier_computed == run.verifier_tokens


async def test_a_plan_without_a_verifier_computes_no_verifier_token() -> None:
    runs = await measure(Plan(("greedy", "self_consistency"), (1, 4)), ScriptedEngine())
    assert {(run.strategy, run.n) for run in runs} == {("greedy", 1), ("self_consistency", 1), ("self_consistency", 4)}
    assert all(run.verifier_tokens == 0 for run in runs)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
async def test_beam_of_n_never_has_more_than_n_branches_on_a_level(n: int) -> None:
    journal = MemoryJournal()
    spec = JobSpec.model_validate({"problem": "how?", "strategy": {"name": "beam", "n": n}, "seed": 1})
    await run_job(spec, ScriptedEngine(), journal)
    levels = [entry.data["node"].count(".") for entry in journal.entries if entry.type == "node"]
    assert max(levels.count(level) for level in set(levels)) <= n
