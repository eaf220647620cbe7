"""Branches that must be equal are generated and scored once, and the search gets every copy."""

from __future__ import annotations

import contextlib

import pytest

from engine.protocol.types import EngineUnavailable
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from tests.long import mostly_long
from tests.planned import Planned, PlannedEngine
from tests.reasoner.budget.test_small_budgets import LENGTH, Paced
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.strategies import WRITING

NAMES = sorted(set(WRITING) - {"greedy", "revise", "budget_forcing"})
"""Strategies that continue the same text several times; the others insert text in between."""


def job(strategy: str, n: int = 16, **more: object) -> JobSpec:
    params = {} if strategy == "greedy" else {"n": n}
    document = {"problem": "how?", "seed": 3, "strategy": {"name": strategy} | params, "sampling": {"temperature": 0}}
    return build_spec(document | more)


async def run(spec: JobSpec, engine: ScriptedEngine | None = None, journal: MemoryJournal | None = None) -> JobOutcome:
    return await run_job(spec, Paced() if engine is None else engine, MemoryJournal() if journal is None else journal)


@pytest.mark.parametrize("strategy", sorted(set(NAMES) - {"auto"}))  # it requests whole solutions beside its steps
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "top_k": 1}])
async def test_with_greedy_sampling_no_token_is_generated_twice(strategy: str, sampling: dict[str, float]) -> None:
    class Likeliest(Paced):
        def token(self, branch, position, temperature):  # type: ignore[no-untyped-def]
            return super().token(branch, position, 0.0)

    engine = Likeliest()
    outcome = await run(job(strategy, sampling=sampling), engine)
    assert len(engine.generated) == len({place for _, _, place in engine.generated})
    assert outcome.usage.generated == len(engine.generated) == LENGTH


async def test_copies_vote_like_separate_samples() -> None:
    alone, many = await run(job("self_consistency", 1)), await run(job("self_consistency", 16))
    assert [vote.count for vote in many.result.votes] == [16]
    assert many.result.confidence == 1.0
    assert many.result.answer == alone.result.answer
    assert many.usage.generated == alone.usage.generated


@pytest.mark.parametrize("strategy", ["best_of_n", "weighted_vote", "rebase", "particle"])
async def test_copies_have_the_score_of_the_original_without_cost(strategy: str) -> None:
    alone, many = await run(job(strategy, 1)), await run(job(strategy, 16))
    assert many.usage.verifier_computed == alone.usage.verifier_computed
    assert many.result.answer == alone.result.answer


async def test_the_journal_marks_copies_and_their_zero_cost() -> None:
    journal = MemoryJournal()
    await run(job("self_consistency", 4), journal=journal)
    nodes = [entry for entry in journal.entries if entry.type == "node"]
    assert [entry.data.get("copy_of") for entry in nodes] == [None, "0", "0", "0"]
    assert [entry.data["tokens"] > 0 for entry in nodes] == [True, False, False, False]
    assert [entry.spend.generated > 0 for entry in nodes] == [True, False, False, False]
    assert len({entry.data["text"] for entry in nodes}) == 1


@pytest.mark.parametrize("strategy", mostly_long(NAMES, every=4))
async def test_a_crashed_job_with_copies_ends_as_an_undisturbed_one_and_pays_no_token_twice(strategy: str) -> None:
    spec = job(strategy, 8, deterministic=True)
    undisturbed = await run(spec)
    for answers in range(0, 12, 2):
        journal = MemoryJournal()
        with contextlib.suppress(EngineUnavailable):
            await run(spec, Paced(die_after=answers), journal)
        resumed = await run(spec, Paced(order=1), journal)
        assert resumed.result == undisturbed.result
        lost = sum(entry.spend.generated for entry in journal.entries if entry.type == "lost")
        assert resumed.usage.generated - lost == undisturbed.usage.generated
        idle = Paced()
        again = await run(spec, idle, MemoryJournal(journal.entries))
        assert (again.result, again.usage, idle.total) == (resumed.result, resumed.usage, 0)


async def test_copies_are_not_counted_as_pruned_tokens() -> None:
    outcome = await run(job("beam", 16))
    assert outcome.usage.pruned <= outcome.usage.generated


async def test_an_equal_sampled_sibling_has_the_score_without_being_scored_again() -> None:
    class Counting(PlannedEngine):
        items = 0

        async def score(self, request):  # type: ignore[no-untyped-def]
            self.items += len(request.items)
            return await super().score(request)

    plan = {(index,): Planned("so \\boxed{1}", 0.8) for index in range(5)} | {(5,): Planned("so \\boxed{2}", 0.6)}
    engine = Counting(plan)
    journal = MemoryJournal()
    spec = build_spec({"problem": "how?", "seed": 0, "strategy": {"name": "weighted_vote", "n": 6}})
    outcome = await run_job(spec, engine, journal)
    assert engine.items == 2
    assert [(vote.answer, vote.count) for vote in outcome.result.votes] == [("1", 5), ("2", 1)]
    assert outcome.result.votes[0].weight == pytest.approx(5 * 0.8)
    assert sum(entry.type == "score" for entry in journal.entries) == 6
