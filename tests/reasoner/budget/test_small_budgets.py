"""A budget that is small for the search's width still ends with an answer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine.protocol.types import Branch
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.base import VerifierUse
from reasoner.strategies.registry import STRATEGIES
from tests.scripted import ANSWER, EOS, SEPARATOR, ScriptedEngine
from tests.specs import build_spec

QUESTION = "how?"
STEP, LENGTH = 10, 40
"""Tokens of a step and of a solution, which is three steps and an answer."""
WIDE = ["beam", "dvts", "lookahead", "rebase", "particle", "mcts", "best_first", "auto"]


class Paced(ScriptedEngine):
    """Scripted engine whose solutions all have the same length."""

    def token(self, branch: Branch, position: int, temperature: float) -> int:
        at = position - len(QUESTION)
        if at >= LENGTH - 1:
            return EOS
        if at == LENGTH - 2:
            return ANSWER
        if at % STEP == STEP - 1:
            return SEPARATOR
        return 40 + super().token(branch, position, temperature) % 50


async def solve(
    strategy: str,
    n: int = 16,
    params: Mapping[str, int] | None = None,
    journal: MemoryJournal | None = None,
    **budget: float,
) -> tuple[JobOutcome, MemoryJournal, Paced]:
    journal, engine = journal or MemoryJournal(), Paced()
    chosen = {"name": strategy, "n": n, **(params or {})}
    job = {"problem": QUESTION, "seed": 3, "strategy": chosen, "budget": budget}
    return await run_job(build_spec(job), engine, journal), journal, engine


@pytest.mark.parametrize("strategy", WIDE)
@pytest.mark.parametrize("tokens", [60, 100, 200, 300])
async def test_a_tree_search_answers_within_a_budget_that_is_small_for_its_width(strategy: str, tokens: int) -> None:
    outcome, _, engine = await solve(strategy, tokens=tokens)
    assert outcome.status == "completed"
    assert outcome.result.answer is not None
    assert outcome.result.finish_reason == "budget"
    assert engine.most <= tokens


@pytest.mark.parametrize("strategy", WIDE)
async def test_a_small_flops_budget_still_ends_with_an_answer(strategy: str) -> None:
    outcome, _, _ = await solve(strategy, flops=2 * 1000 * 400)
    assert outcome.result.answer is not None


@pytest.mark.parametrize("strategy", WIDE)
async def test_a_budget_that_does_not_bind_does_not_change_the_search(strategy: str) -> None:
    free, _, _ = await solve(strategy)
    bound, _, _ = await solve(strategy, tokens=1_000_000)
    assert bound.result == free.result
    assert bound.usage.total == free.usage.total


@pytest.mark.parametrize("strategy", WIDE)
async def test_what_was_set_aside_is_spent_once_there_is_an_answer(strategy: str) -> None:
    """The rest of the budget is not lost after a branch was finished with tokens set aside."""
    outcome, _, _ = await solve(strategy, tokens=200)
    assert outcome.usage.total > 200 - LENGTH


@pytest.mark.parametrize("strategy", ["beam", "dvts", "best_first"])
async def test_no_branch_is_finished_specially_if_the_search_reaches_an_answer(strategy: str) -> None:
    """Half of the tokens are spent before any branch ends; the length of the steps shows that setting aside less
    suffices.
    """
    _, journal, _ = await solve(strategy, n=4, tokens=400)
    ended = [entry for entry in journal.entries if entry.type == "node" and entry.data["answer"] is not None]
    assert sum(entry.spend.total for entry in journal.entries[: journal.entries.index(ended[0])]) > 200
    assert ended[0].key.startswith("expand:")


@pytest.mark.parametrize("strategy", WIDE)
async def test_a_replay_finishes_the_same_branch(strategy: str) -> None:
    outcome, journal, _ = await solve(strategy, tokens=200)
    idle = Paced()
    job = {"problem": QUESTION, "seed": 3, "strategy": {"name": strategy, "n": 16}, "budget": {"tokens": 200}}
    again = await run_job(build_spec(job), idle, MemoryJournal(journal.entries))
    assert (again.result, again.usage, idle.total) == (outcome.result, outcome.usage, 0)


@pytest.mark.parametrize("strategy", sorted(set(WIDE) - {"auto"}))  # auto samples whole solutions beside its steps
async def test_a_search_that_used_all_steps_before_any_branch_ended_finishes_the_best_one(strategy: str) -> None:
    outcome, journal, _ = await solve(strategy, n=4, params={"max_steps": 2})
    assert outcome.status == "completed"
    assert outcome.result.finish_reason == "answer"
    assert sum(entry.key.startswith("complete:") for entry in journal.entries) == 1
    idle = MemoryJournal(journal.entries)
    again, _, engine = await solve(strategy, n=4, params={"max_steps": 2}, journal=idle)
    assert (again.result, again.usage, engine.total) == (outcome.result, outcome.usage, 0)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_search_that_used_all_samples_before_any_branch_ended_finishes_the_best_one(n: int) -> None:
    outcome, _, _ = await solve("mcts", n=n)
    assert outcome.result.answer is not None


def test_every_step_by_step_strategy_is_covered() -> None:
    by_steps = {name for name, strategy in STRATEGIES.items() if strategy.verifier is VerifierUse.STEP_SCORES}
    assert by_steps <= set(WIDE)
