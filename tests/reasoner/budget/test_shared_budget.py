"""Jobs with a shared budget on the scripted engine: never over it, and every replay decides the same."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.batch.shared_budget import SharedBudget
from engine.protocol.types import EngineUnavailable
from reasoner.budget.allocator import TokenRequest
from reasoner.budget.grant_source import StoredGrants, WaitingForBudget
from reasoner.budget.ledger import Ledger
from reasoner.budget.spec import Budget
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.rule_specs import RegexVerifier, RuleSpec
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.registry import STRATEGIES
from tests.docs.blocks import ROOT, blocks
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.strategies import WRITING

NAMES = WRITING
RULE = {"kind": "congruent", "modulus": 1}
"""Accepts every whole number."""


def spec(strategy: str, seed: int, **budget: float) -> JobSpec:
    known = STRATEGIES[strategy].params.model_fields
    params = {"n": 8} if "n" in known else {}
    return build_spec(
        {"problem": f"how? {seed}", "seed": seed, "strategy": {"name": strategy} | params, "budget": budget}
    )


async def run_batch(
    specs: list[JobSpec], budget: int, engine: ScriptedEngine
) -> tuple[SharedBudget, list[JobOutcome], list[MemoryJournal]]:
    names = [str(number) for number in range(len(specs))]
    shared = SharedBudget(budget, names, max_active=2)
    journals = [MemoryJournal(grant_source=shared.member(name)) for name in names]

    async def one(job: JobSpec, name: str, journal: MemoryJournal) -> JobOutcome:
        try:
            outcome = await run_job(job, engine, journal)
        finally:
            shared.end(name, sum(entry.spend.total for entry in journal.entries))
        return outcome

    jobs = zip(specs, names, journals, strict=True)
    return shared, await asyncio.gather(*(one(*job) for job in jobs)), journals


@given(
    strategies=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    budget=st.integers(5, 6000),
    order=st.integers(0, 1000),
    cap=st.one_of(st.none(), st.integers(1, 500)),
)
async def test_a_batch_never_exceeds_its_budget_and_each_job_keeps_its_cap(
    strategies: list[str], seed: int, budget: int, order: int, cap: int | None
) -> None:
    engine = ScriptedEngine(order=order)
    limits: dict[str, float] = {} if cap is None else {"tokens": cap}
    specs = [spec(name, seed + number, **limits) for number, name in enumerate(strategies)]
    shared, outcomes, journals = await run_batch(specs, budget, engine)
    assert engine.most <= budget
    assert engine.total == sum(outcome.usage.total for outcome in outcomes) <= budget
    assert shared.pool.unassigned == budget - engine.total
    for job, outcome, journal in zip(specs, outcomes, journals, strict=True):
        assert cap is None or outcome.usage.total <= cap
        idle = ScriptedEngine()
        replay = MemoryJournal(journal.entries, StoredGrants(0, closed=False))
        again = await run_job(job, idle, replay)
        assert (again.result, again.usage) == (outcome.result, outcome.usage)
        assert idle.total == 0


@given(
    strategy=st.sampled_from(NAMES),
    seed=st.integers(0, 1000),
    grants=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    order=st.integers(0, 1000),
    die_after=st.one_of(st.none(), st.integers(0, 10)),
)
async def test_a_job_parked_and_crashed_spends_exactly_its_grants(
    strategy: str, seed: int, grants: list[int], order: int, die_after: int | None
) -> None:
    """Do as a worker does: run, park, and run again from the journal with a larger grant, with crashes in between."""
    job, journal, granted = spec(strategy, seed), MemoryJournal(), 0
    outcome: JobOutcome | None = None
    for number, grant in enumerate(grants):
        granted += grant
        journal.grant_source = StoredGrants(granted, closed=False)
        with contextlib.suppress(WaitingForBudget, EngineUnavailable):
            outcome = await run_job(job, ScriptedEngine(order=order + number, die_after=die_after), journal)
        assert sum(entry.spend.total for entry in journal.entries) <= granted
        if outcome is not None:
            break
    if outcome is None:
        journal.grant_source = StoredGrants(granted, closed=True)
        outcome = await run_job(job, ScriptedEngine(order=order), journal)
    assert outcome.usage.total <= granted
    keys = [entry.key for entry in journal.entries]
    assert len(set(keys)) == len(keys)
    assert not [entry for entry in journal.entries if entry.type == "lost"]
    idle = ScriptedEngine()
    again = await run_job(job, idle, MemoryJournal(journal.entries, StoredGrants(0, closed=False)))
    assert (again.result, again.usage, idle.total) == (outcome.result, outcome.usage, 0)


async def test_a_job_with_sufficient_grants_has_the_result_of_a_job_alone() -> None:
    alone = await run_job(spec("weighted_vote", 3), ScriptedEngine(), MemoryJournal())
    _, [shared], [journal] = await run_batch([spec("weighted_vote", 3)], 100_000, ScriptedEngine())
    assert shared.result == alone.result
    assert sum(entry.type == "grant" for entry in journal.entries) == 1


async def test_a_closed_job_returns_its_best_answer_so_far() -> None:
    roomy = await run_job(spec("self_consistency", 3), ScriptedEngine(), MemoryJournal())
    half = roomy.usage.total // 2
    journal = MemoryJournal(grant_source=StoredGrants(half, closed=False))
    with pytest.raises(WaitingForBudget) as parked:
        await run_job(spec("self_consistency", 3), ScriptedEngine(), journal)
    assert parked.value.request.tokens > 0
    journal.grant_source = StoredGrants(half, closed=True)
    outcome = await run_job(spec("self_consistency", 3), ScriptedEngine(), journal)
    assert (outcome.status, outcome.result.finish_reason, outcome.usage.total) == ("completed", "budget", half)


def load_congruent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[RuleSpec]:
    """Return the rule of the guide on verifiers, which is of no package of ours."""
    page = ROOT / "docs" / "how-to" / "add-a-verifier.md"
    (folder / "guide_rule.py").write_text(next(block.code for block in blocks(page) if block.mark == "verifier"))
    monkeypatch.syspath_prepend(folder)
    rule: type[RuleSpec] = importlib.import_module("guide_rule").CongruentVerifier
    return rule


async def test_a_rule_that_the_guide_adds_leaves_as_little_to_gain_as_one_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    congruent = load_congruent(tmp_path, monkeypatch)
    doubtful = type("Doubtful", (congruent,), {"is_conclusive": False, "__annotations__": {}})
    accept_all = (RegexVerifier(kind="regex", pattern=r"\d+"), congruent.model_validate(RULE), doubtful(**RULE))
    gains = []
    for rule in accept_all:
        job = spec("weighted_vote", 3).model_copy(update={"verifier": rule})
        with pytest.raises(WaitingForBudget) as parked:
            await run_job(job, ScriptedEngine(), MemoryJournal(grant_source=StoredGrants(120, closed=False)))
        gains.append(parked.value.request.gain)
    ours, added, uncertain = gains
    assert ours == added == 0.0 < uncertain


async def test_a_job_that_ends_while_waiting_passes_its_grant_on() -> None:
    shared = SharedBudget(100, ["a", "b"], max_active=1)
    first = asyncio.create_task(shared.member("a").request_tokens(12, TokenRequest(30, 0.9)))
    second = asyncio.create_task(shared.member("b").request_tokens(12, TokenRequest(30, 0.1)))
    assert await first == 30
    again = asyncio.create_task(shared.member("a").request_tokens(42, TokenRequest(30, 0.9)))
    assert await again == 30
    again = asyncio.create_task(shared.member("a").request_tokens(72, TokenRequest(30, 0.05)))
    assert await second == 16
    again.cancel()
    shared.end("a", 72)
    shared.end("b", 0)
    assert shared.pool.unassigned == 28


@pytest.mark.parametrize(
    ("limits", "helps"),
    [({}, True), ({"tokens": 100}, True), ({"tokens": 50}, False), ({"flops": 1e6}, True), ({"seconds": 5.0}, True)],
)
def test_a_grant_is_requested_only_when_the_tokens_run_out(limits: dict[str, float], helps: bool) -> None:
    now = 0.0
    ledger = Ledger(Budget.model_validate(limits), clock=lambda: now, from_shared_pool=True)
    ledger.add_grant(50)
    assert ledger.needs_grant(60) is helps
    assert not ledger.needs_grant(50)
    now = 6.0
    assert ledger.needs_grant(60) is (helps and "seconds" not in limits)
