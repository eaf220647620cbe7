"""Several policies in one search: their shares, their bills, and the properties that every search has."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.protocol.types import EngineUnavailable, InvalidRequest, ModelInfo
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.budget.prices import Prices
from reasoner.jobs.journal import JobCancelled, MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from reasoner.search.policies.policy import count_samples, find_sample_number, spread_samples
from reasoner.strategies.merging.prompts import NOTE
from tests.reasoner.search.test_stream import Delayed, tree
from tests.reasoner.test_best_so_far import CancelledAt
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from workers.config.settings import Settings

VARIANTS: list[dict[str, Any]] = [
    {"name": "best_of_n", "n": 7},
    {"name": "self_consistency", "n": 9},
    {"name": "self_consistency", "n": 9, "stop": "beta"},
    {"name": "weighted_vote", "n": 5},
    {"name": "tournament", "n": 4},
    {"name": "synthesize", "n": 4},
    {"name": "synthesize", "n": 4, "judge": "report", "judged_by": "other", "written_by": "policy"},
    {"name": "synthesize", "n": 4, "judge": "verifier", "mode": "select", "written_by": "other"},
    {"name": "ab_mcts", "n": 9, "parallel": 3, "request": "Again?"},
    {"name": "ab_mcts", "n": 7, "parallel": 2, "variant": "m", "request": "Again?"},
]
STRATEGIES = st.sampled_from(VARIANTS)
BUDGETS = st.one_of(st.none(), st.integers(1, 1500))
WEIGHTS = st.lists(st.floats(0.1, 10), min_size=2, max_size=8)
MODELS = [{"model": "policy", "weight": 2, "wait_seconds": 0}, {"model": "other", "wait_seconds": 0}]
SHOWN = "{{ problem }} {% for text in solutions %}{{ text }} {% endfor %}"
TEMPLATES = {"aggregate": SHOWN + "{{ report }}", "select": SHOWN, "report": SHOWN}
"""Prompts of merging that fit into the context of an engine without a model."""
PRICES = {"policy": Prices(generated=1.0), "other": Prices(generated=5.0), "prm": Prices(prompt=2.0)}


class Two(Delayed):
    """Serves a second policy of three times the size, with sampling parameters of its own."""

    async def models(self) -> list[ModelInfo]:
        policy, prm = await super().models()
        policy = replace(policy, extra=policy.extra | {NOTE: TEMPLATES})
        other = replace(policy, id="other", parameters=3 * policy.parameters, sampling={"temperature": 0.5})
        return [policy, other, prm]


def name_fields(strategy: dict[str, Any], seed: int = 1, **more: Any) -> dict[str, Any]:
    return {"problem": "how?", "models": MODELS, "seed": seed, "strategy": strategy, "answer": "text"} | more


def spec(strategy: dict[str, Any], seed: int = 1, tokens: int | None = None, **more: Any) -> JobSpec:
    return build_spec(name_fields(strategy, seed, budget={"tokens": tokens}) | more)


# Shares.


@given(weights=WEIGHTS, count=st.integers(1, 100))
def test_after_any_number_of_samples_each_policy_has_its_share(weights: list[float], count: int) -> None:
    counts = count_samples(weights, 0, count)
    assert sum(counts) == count
    for weight, own in zip(weights, counts, strict=True):
        assert abs(own - count * weight / sum(weights)) <= len(weights)


@given(weights=WEIGHTS, start=st.integers(0, 30), more=st.integers(0, 30))
def test_sample_numbers_undo_the_spread(weights: list[float], start: int, more: int) -> None:
    seen = Counter[int]()
    for number, policy in zip(range(start + more), spread_samples(weights), strict=False):
        assert find_sample_number(weights, policy, seen[policy]) == number
        seen[policy] += 1
    parts = [count_samples(weights, 0, start), count_samples(weights, start, start + more)]
    assert [sum(pair) for pair in zip(*parts, strict=True)] == count_samples(weights, 0, start + more)


async def test_samples_come_from_all_policies_by_weight_each_with_its_own_parameters() -> None:
    engine, journal = Two(1), MemoryJournal()
    await run_job(spec({"name": "self_consistency", "n": 9}), engine, journal)
    branches = Counter[tuple[str, float]]()
    for request in engine.requests:
        branches[request.model, request.sampling.temperature] += len(request.branches)
    assert branches == {("policy", 1.0): 6, ("other", 0.5): 3}
    written = Counter(
        entry.data["model"] for entry in journal.entries if entry.type == "node" and entry.data["reason"] != "said"
    )
    assert written == {"policy": 6, "other": 3}


async def test_parameters_that_the_job_gives_are_those_of_all_policies() -> None:
    engine = Two(1)
    job = spec({"name": "best_of_n", "n": 4}, sampling={"temperature": 0.9})
    await run_job(job, engine, MemoryJournal())
    assert {(request.model, request.sampling.temperature) for request in engine.requests} == {
        ("policy", 0.9),
        ("other", 0.9),
    }


# Properties of every search.


@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=st.integers(1, 1500))
async def test_the_budget_is_kept_to_the_token(strategy: dict[str, Any], seed: int, tokens: int) -> None:
    engine = Two(seed)
    outcome = await run_job(spec(strategy, seed, tokens), engine, MemoryJournal())
    assert engine.most <= tokens
    assert engine.total == outcome.usage.total <= tokens
    assert engine.outstanding == 0


@given(strategy=STRATEGIES, seed=st.integers(0, 1000), cents=st.floats(0.01, 0.3), flops=st.floats(2e4, 3e6))
async def test_each_policys_own_price_and_size_hold_against_the_budget(
    strategy: dict[str, Any], seed: int, cents: float, flops: float
) -> None:
    for budget in ({"cost": cents / 100}, {"flops": flops}):
        outcome = await run_job(spec(strategy, seed, budget=budget), Two(seed), MemoryJournal(), prices=PRICES)
        assert outcome.usage.cost <= cents / 100 or "cost" not in budget
        assert outcome.usage.flops <= flops or "flops" not in budget


@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS)
async def test_the_bills_of_the_models_add_up_to_the_jobs(
    strategy: dict[str, Any], seed: int, tokens: int | None
) -> None:
    outcome = await run_job(spec(strategy, seed, tokens), Two(seed), MemoryJournal(), prices=PRICES)
    by_model = outcome.result.usage_by_model
    assert set(by_model) <= {"policy", "other", "prm"}
    assert sum(usage.total for usage in by_model.values()) == outcome.usage.total
    assert sum(usage.prompt for usage in by_model.values()) == outcome.usage.prompt
    assert sum(usage.cost for usage in by_model.values()) == pytest.approx(outcome.usage.cost)
    generated = 1e-6 * (by_model["policy"].generated + 5 * by_model["other"].generated) if len(by_model) > 1 else 0.0
    if strategy["name"] in ("self_consistency",) and generated:
        assert outcome.usage.cost == pytest.approx(generated)


@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, kept=st.floats(0, 1))
async def test_a_replay_decides_the_same_and_sends_no_request(
    strategy: dict[str, Any], seed: int, tokens: int | None, kept: float
) -> None:
    job, journal, idle = spec(strategy, seed, tokens), MemoryJournal(), Two(0)
    first = await run_job(job, Two(seed), journal)
    again = await run_job(job, idle, MemoryJournal(journal.entries))
    assert (again.result, again.usage) == (first.result, first.usage)
    assert idle.total == 0
    prefix = journal.entries[: int(kept * len(journal.entries))]
    resumed = MemoryJournal(prefix)
    await run_job(job, Two(seed + 1), resumed)
    assert resumed.entries[: len(prefix)] == prefix


@given(strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, die_after=st.integers(0, 40))
async def test_a_crashed_job_pays_no_token_twice(
    strategy: dict[str, Any], seed: int, tokens: int | None, die_after: int
) -> None:
    job, journal = spec(strategy, seed, tokens), MemoryJournal()
    dying, fresh = Two(seed, die_after=die_after), Two(seed + 1)
    with contextlib.suppress(EngineUnavailable):
        await run_job(job, dying, journal)
    outcome = await run_job(job, fresh, journal)
    assert outcome.usage.generated == len(dying.generated) + len(fresh.generated)


@given(
    strategy=STRATEGIES, seed=st.integers(0, 1000), tokens=BUDGETS, one=st.integers(0, 999), other=st.integers(0, 999)
)
async def test_a_deterministic_job_searches_the_same_tree_for_any_delays(
    strategy: dict[str, Any], seed: int, tokens: int | None, one: int, other: int
) -> None:
    job = spec(strategy, seed, tokens, deterministic=True)
    first, second = MemoryJournal(), MemoryJournal()
    results = [await run_job(job, Two(delays), journal) for delays, journal in ((one, first), (other, second))]
    assert results[0].result.answer == results[1].result.answer
    assert tree(first) == tree(second)


async def test_a_cancelled_job_has_the_bill_of_each_model() -> None:
    journal = CancelledAt(8)
    with pytest.raises(JobCancelled) as raised:
        await run_job(spec({"name": "best_of_n", "n": 8}), Two(3), journal)
    assert raised.value.result is not None
    by_model = raised.value.result.usage_by_model
    assert sum(usage.generated for usage in by_model.values()) == sum(e.spend.generated for e in journal.entries)


async def test_one_policy_has_no_bill_by_model_and_no_names_in_its_journal() -> None:
    journal = MemoryJournal()
    job = build_spec({"problem": "how?", "seed": 1, "strategy": {"name": "best_of_n", "n": 3}})
    outcome = await run_job(job, ScriptedEngine(), journal)
    assert outcome.result.usage_by_model == {}
    assert all("model" not in entry.data for entry in journal.entries)


# Refusals.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"models": [{"model": "policy"}, {"model": "policy"}]}, "'policy' is named twice"),
        ({"models": [{"model": "policy"}]}, "at least 2 items"),
        ({"models": [{"model": "policy"}, {"model": "other", "weight": 0}]}, "greater than 0"),
        ({"models": MODELS, "model": "other"}, "either 'model' or 'models', not both"),
    ],
)
def test_impossible_lists_of_models_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_spec({"problem": "how?"} | fields)


def test_a_strategy_for_one_model_and_a_probe_are_refused_with_what_would_be_right() -> None:
    with pytest.raises(JobRefused, match=r"models: strategy 'beam' searches with one model: .*use one of .*ab_mcts"):
        spec({"name": "beam"})
    with pytest.raises(JobRefused, match="models: a probe reads the states of one policy"):
        spec({"name": "best_of_n"}, verifier={"kind": "probe"})


async def test_a_model_that_is_not_served_is_refused_before_a_token_is_spent() -> None:
    fields = name_fields({"name": "best_of_n"}, models=[{"model": "policy"}, {"model": "gone"}])
    with pytest.raises(InvalidRequest, match=r"models.1.model 'gone' is not served; served are other, policy"):
        await run_job(build_spec(fields), Two(1), MemoryJournal())
    with pytest.raises(JobRefused, match=r"models.1.model 'gone' is not served"):
        await resolve_job(JobRequest.model_validate(fields), Settings(), Two(1))


async def test_a_resolved_job_keeps_its_models_and_leaves_their_sampling_open() -> None:
    job = JobRequest.model_validate(name_fields({"name": "best_of_n"}))
    resolved = await resolve_job(job, Settings(), Two(1))
    assert resolved.models == job.models
    assert resolved.model == "policy"
    assert resolved.sampling.temperature is None
    assert JobSpec.model_validate(resolved.model_dump()) == resolved
