"""Strategies that work on whole solutions: budgets, replays and crashes with every parameter that changes decisions."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import EngineUnavailable
from reasoner.jobs import JobSpec
from reasoner.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from tests.reasoner.test_stream import Delayed, tree
from tests.scripted import ScriptedEngine

VARIANTS: list[dict[str, Any]] = [
    {"name": "self_consistency", "n": 12, "stop": "beta"},
    {"name": "self_consistency", "n": 12, "stop": "beta", "threshold": 0.8, "ahead": 3},
    {"name": "self_consistency", "n": 12, "stop": "window", "window": 2},
]
STRATEGIES = st.sampled_from(VARIANTS)
BUDGETS = st.one_of(st.none(), st.integers(1, 1500))


def spec(strategy: dict[str, Any], seed: int, tokens: int | None = None, **more: object) -> JobSpec:
    base = {"problem": "how?", "seed": seed, "strategy": strategy, "budget": {"tokens": tokens}, "answer": "text"}
    return JobSpec.model_validate(base | more)


async def solve(strategy: dict[str, Any], seed: int, **more: Any) -> tuple[JobOutcome, MemoryJournal]:
    journal = MemoryJournal()
    outcome = await run_job(spec(strategy, seed, **more), Delayed(seed), journal)
    return outcome, journal


@settings(max_examples=100, deadline=None)
@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=st.integers(1, 1500))
async def test_the_budget_is_kept_to_the_token(strategy: dict[str, Any], seed: int, tokens: int) -> None:
    engine = Delayed(seed)
    outcome = await run_job(spec(strategy, seed, tokens), engine, MemoryJournal())
    assert engine.most <= tokens
    assert engine.total == outcome.usage.total <= tokens
    assert engine.outstanding == 0


@settings(max_examples=100, deadline=None)
@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, kept=st.floats(0, 1))
async def test_a_replay_decides_the_same_and_asks_the_engine_for_nothing(
    strategy: dict[str, Any], seed: int, tokens: int | None, kept: float
) -> None:
    job, journal, idle = spec(strategy, seed, tokens), MemoryJournal(), ScriptedEngine()
    first = await run_job(job, Delayed(seed), journal)
    again = await run_job(job, idle, MemoryJournal(journal.entries))
    assert (again.result, again.usage) == (first.result, first.usage)
    assert idle.total == 0
    prefix = journal.entries[: int(kept * len(journal.entries))]
    resumed = MemoryJournal(prefix)
    await run_job(job, Delayed(seed + 1), resumed)
    assert resumed.entries[: len(prefix)] == prefix


@settings(max_examples=100, deadline=None)
@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, die_after=st.integers(0, 40))
async def test_a_job_that_crashed_pays_no_token_twice_and_every_branch_ends_with_a_reason(
    strategy: dict[str, Any], seed: int, tokens: int | None, die_after: int
) -> None:
    job, journal = spec(strategy, seed, tokens), MemoryJournal()
    dying, fresh = Delayed(seed, die_after=die_after), Delayed(seed + 1)
    with contextlib.suppress(EngineUnavailable):
        await run_job(job, dying, journal)
    outcome = await run_job(job, fresh, journal)
    assert outcome.usage.generated == dying.total + fresh.total
    begun = [entry.data["node"] for entry in journal.entries if entry.type == "node"]
    ended = [entry.data["node"] for entry in journal.entries if entry.type == "node" and entry.data["final"]]
    assert set(begun) == set(ended)
    assert len(set(ended)) == len(ended)


@settings(max_examples=60, deadline=None)
@given(
    strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, one=st.integers(0, 999), other=st.integers(0, 999)
)
async def test_a_deterministic_job_searches_the_same_tree_whatever_the_delays(
    strategy: dict[str, Any], seed: int, tokens: int | None, one: int, other: int
) -> None:
    job = spec(strategy, seed, tokens, deterministic=True)
    first, second = MemoryJournal(), MemoryJournal()
    results = [await run_job(job, Delayed(delays), journal) for delays, journal in ((one, first), (other, second))]
    assert results[0].result == results[1].result
    assert tree(first) == tree(second)


@pytest.mark.parametrize("limit", [1, 7, 30])
@pytest.mark.parametrize("strategy", VARIANTS)
async def test_max_tokens_bounds_what_is_generated_for_a_solution(strategy: dict[str, Any], limit: int) -> None:
    _, journal = await solve(strategy, 4, sampling={"max_tokens": limit})
    for node in solutions(journal):
        assert sum(entry["tokens"] for entry in node) <= limit


def solutions(journal: MemoryJournal) -> list[list[dict[str, Any]]]:
    """The entries of every node and of those above it, down from where its conversation begins."""
    by_id: dict[str, dict[str, Any]] = {}
    for entry in journal.entries:
        if entry.type == "node":
            known = by_id.setdefault(entry.data["node"], dict(entry.data) | {"tokens": 0})
            known["tokens"] += entry.data["tokens"]
    found = []
    for node in by_id.values():
        above = [node]
        while above[0]["parent"] and not above[0].get("fresh"):
            above.insert(0, by_id[above[0]["parent"]])
        found.append(above)
    return found


# Self-consistency.


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rule", [{"stop": "beta"}, {"stop": "window", "window": 3}])
async def test_a_vote_that_stops_early_hears_the_first_samples_of_the_plain_one_and_wastes_none(
    rule: dict[str, Any], seed: int
) -> None:
    plain, pool = await solve({"name": "self_consistency", "n": 16}, seed)
    early, journal = await solve({"name": "self_consistency", "n": 16} | rule, seed)
    every = {entry.data["node"]: entry.data["text"] for entry in pool.entries if entry.type == "node"}
    heard = {entry.data["node"]: entry.data["text"] for entry in journal.entries if entry.type == "node"}
    assert heard == {str(number): every[str(number)] for number in range(len(heard))}
    assert all(entry.data["reason"] != "cancelled" for entry in journal.entries if entry.type == "node")
    assert early.usage.generated <= plain.usage.generated


async def test_samples_that_were_started_ahead_are_cancelled_when_the_vote_is_over_and_paid_for() -> None:
    rule = {"name": "self_consistency", "n": 16, "stop": "window", "window": 2}
    cancelled = 0
    for seed in range(20):
        exact, _ = await solve(rule, seed)
        early, journal = await solve(rule | {"ahead": 8}, seed)
        nodes = {entry.data["node"]: entry.data for entry in journal.entries if entry.type == "node"}
        cancelled += sum(node["reason"] == "cancelled" for node in nodes.values())
        assert early.usage.generated == sum(node["tokens"] for node in nodes.values())
        assert early.usage.generated >= exact.usage.generated
        windows = [(nodes[str(at)], nodes[str(at + 1)]) for at in range(0, len(nodes) - 1, 2)]
        over = [one["answer"] == other["answer"] is not None for one, other in windows]
        assert any(over) or len(nodes) == 16
    assert cancelled > 0
