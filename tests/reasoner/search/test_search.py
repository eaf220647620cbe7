"""The search context: budget to the token, replay from any crash, cancellation, stop reasons."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import Completion, Delta, EngineUnavailable, GenerateRequest, InvalidRequest
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry, JobCancelled, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.search.replay import ReplayMismatch
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.strategies import WRITING

NAMES = WRITING
REACTS = {"mcts", "early_exit", "first_finished"}
"""Strategies whose decisions depend on the arrival order, unless the job is ``deterministic``."""


def spec(strategy: str, seed: int = 0, tokens: int | None = None, **more: object) -> JobSpec:
    params = {} if strategy == "greedy" else {"n": 8}
    return build_spec(
        {"problem": "how?", "seed": seed, "strategy": {"name": strategy} | params, "budget": {"tokens": tokens}} | more
    )


async def run(job: JobSpec, engine: ScriptedEngine, journal: MemoryJournal | None = None) -> JobOutcome:
    return await run_job(job, engine, journal or MemoryJournal())


@given(
    strategy=st.sampled_from(NAMES),
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 2500),
    order=st.integers(0, 1000),
    warm=st.booleans(),
)
async def test_no_strategy_requests_more_tokens_than_the_budget_has_left(
    strategy: str, seed: int, tokens: int, order: int, warm: bool
) -> None:
    engine = ScriptedEngine(order=order, warm=warm)
    outcome = await run(spec(strategy, seed, tokens), engine)
    assert engine.most <= tokens
    assert engine.total == outcome.usage.total <= tokens
    assert engine.outstanding == 0


@given(strategy=st.sampled_from(NAMES), seed=st.integers(0, 1000), tokens=st.integers(1, 2500))
async def test_draft_tokens_are_billed_but_do_not_count_against_the_token_budget(
    strategy: str, seed: int, tokens: int
) -> None:
    plain = await run(spec(strategy, seed, tokens), ScriptedEngine())
    guessing = await run(spec(strategy, seed, tokens), ScriptedEngine(guesses=True))
    assert guessing.result == plain.result
    bill = guessing.usage
    assert (bill.generated, bill.total) == (plain.usage.generated, plain.usage.total)
    assert (plain.usage.drafted, bill.drafted) == (0, 3 * bill.generated)
    assert bill.accepted <= bill.generated / 2
    # The scripted model has 1000 weights; rejected draft tokens are computed all the same.
    assert bill.flops - plain.usage.flops == pytest.approx(2000 * (bill.drafted - bill.accepted))


@given(
    strategy=st.sampled_from([name for name in NAMES if name not in REACTS]),
    seed=st.integers(0, 1000),
    order=st.integers(0, 1000),
)
async def test_the_order_of_arrivals_does_not_change_the_result_without_a_binding_budget(
    strategy: str, seed: int, order: int
) -> None:
    first = await run(spec(strategy, seed), ScriptedEngine(order=0))
    second = await run(spec(strategy, seed), ScriptedEngine(order=order))
    assert first.result == second.result
    assert first.usage.generated == second.usage.generated


@given(
    strategy=st.sampled_from(NAMES),
    seed=st.integers(0, 1000),
    tokens=st.one_of(st.none(), st.integers(1, 2500)),
    die_after=st.integers(0, 40),
    order=st.integers(0, 1000),
)
async def test_a_job_resumed_after_a_crash_ends_like_an_undisturbed_one_and_pays_no_token_twice(
    strategy: str, seed: int, tokens: int | None, die_after: int, order: int
) -> None:
    job = spec(strategy, seed, tokens, deterministic=strategy in REACTS)
    journal = MemoryJournal()
    dying = ScriptedEngine(order=order, die_after=die_after)
    with contextlib.suppress(EngineUnavailable):
        await run(job, dying, journal)
    before = len(journal.entries)
    fresh = ScriptedEngine(order=order + 1)
    resumed = await run(job, fresh, journal)
    keys = [entry.key for entry in journal.entries]
    assert len(set(keys)) == len(keys)
    journaled = sum(entry.spend.generated for entry in journal.entries[:before])
    assert len(fresh.generated) == resumed.usage.generated - journaled
    if tokens is None:
        undisturbed = await run(job, ScriptedEngine(order=order + 2))
        lost = sum(entry.spend.generated for entry in journal.entries if entry.type == "lost")
        assert resumed.result == undisturbed.result
        assert resumed.usage.generated - lost == undisturbed.usage.generated
    else:
        assert resumed.usage.total <= tokens


@given(
    strategy=st.sampled_from(NAMES),
    seed=st.integers(0, 1000),
    tokens=st.one_of(st.none(), st.integers(1, 2500)),
    kept=st.floats(0, 1),
    order=st.integers(0, 1000),
)
async def test_a_full_replay_sends_no_request_and_any_prefix_is_replayed_unchanged(
    strategy: str, seed: int, tokens: int | None, kept: float, order: int
) -> None:
    job, journal = spec(strategy, seed, tokens), MemoryJournal()
    first = await run(job, ScriptedEngine(order=order), journal)
    idle = ScriptedEngine()
    again = await run(job, idle, MemoryJournal(journal.entries))
    assert again.result == first.result
    assert again.usage == first.usage
    assert idle.total == 0
    prefix = journal.entries[: int(kept * len(journal.entries))]
    resumed = MemoryJournal(prefix)
    await run(job, ScriptedEngine(order=order + 7), resumed)
    assert resumed.entries[: len(prefix)] == prefix


async def test_segments_cut_by_small_reservations_have_the_tokens_of_the_whole_branch() -> None:
    whole, parts = MemoryJournal(), MemoryJournal()
    await run(spec("self_consistency", 5), ScriptedEngine(), whole)
    await run(spec("self_consistency", 5, tokens=400), ScriptedEngine(), parts)
    texts = {entry.data["node"]: entry.data["text"] for entry in whole.entries if entry.type == "node"}
    joined: dict[str, str] = {}
    for entry in parts.entries:
        if entry.type == "node":
            joined[entry.data["node"]] = joined.get(entry.data["node"], "") + entry.data["text"]
    assert any(entry.data.get("part", 0) > 0 for entry in parts.entries)
    assert all(texts[node].startswith(text) for node, text in joined.items())


async def test_a_small_budget_yields_whole_answers_instead_of_many_beginnings() -> None:
    roomy = await run(spec("self_consistency", 3), ScriptedEngine())
    longest = roomy.usage.generated
    tight = await run(spec("self_consistency", 3, tokens=longest // 2), ScriptedEngine())
    assert tight.status == "completed"
    assert tight.result.finish_reason == "budget"
    assert 0 < sum(vote.count for vote in tight.result.votes) < 8


async def test_a_binding_budget_is_used_to_the_last_token() -> None:
    engine = ScriptedEngine()
    outcome = await run(spec("self_consistency", 3, tokens=50), engine)
    assert outcome.usage.total == 50
    assert outcome.result.finish_reason == "budget"


async def test_cancelling_aborts_requests_in_flight_and_commits_their_tokens() -> None:
    class Blocking(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            self.aborted = asyncio.Event()

        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            cancelled.set()
            await self.aborted.wait()
            async for item in super().generate(request, stream=stream):
                yield item

        async def abort(self, request_id: str) -> None:
            await super().abort(request_id)
            self.aborted.set()

    cancelled, journal, engine = asyncio.Event(), MemoryJournal(), Blocking()
    with pytest.raises(JobCancelled):
        await run_job(spec("best_of_n"), engine, journal, cancelled=cancelled)
    assert [entry.data["reason"] for entry in journal.entries] == ["cancelled"] * 8


async def test_every_request_carries_the_name_of_its_job() -> None:
    class Watched(ScriptedEngine):
        async def generate(
            self, request: GenerateRequest, *, stream: bool = False
        ) -> AsyncIterator[Completion | Delta]:
            names.append(request.request_id)
            async for item in super().generate(request, stream=stream):
                yield item

    names, journal = list[str](), MemoryJournal()
    await run(spec("beam"), Watched(), journal)
    assert len(names) == len(set(names)) > 1
    assert all(name.startswith(f"{journal.job_id}-") for name in names)


async def test_an_engine_failure_still_commits_the_tokens_received() -> None:
    journal = MemoryJournal()
    engine = ScriptedEngine(die_after=3)
    with pytest.raises(EngineUnavailable):
        await run(spec("self_consistency"), engine, journal)
    assert sum(entry.spend.generated for entry in journal.entries) == engine.total > 0


async def test_a_journal_of_another_strategy_is_refused() -> None:
    alien = Entry("prune:0", "prune", {"nodes": ["0"], "batch": 0}, Usage(), 0.0)
    with pytest.raises(ReplayMismatch, match="prune:0"):
        await run(spec("greedy"), ScriptedEngine(), MemoryJournal([alien]))


async def test_an_expired_time_budget_ends_the_search_with_its_result_so_far() -> None:
    job = spec("self_consistency", 1, budget={"seconds": 1e-9})
    outcome = await run(job, ScriptedEngine())
    assert outcome.status == "incomplete"
    assert outcome.result.finish_reason == "budget"


async def test_a_replay_restores_the_clock_so_time_before_a_crash_counts() -> None:
    journal = MemoryJournal()
    await run(spec("self_consistency", 1), ScriptedEngine(), journal)
    first = journal.entries[0]
    spent = Entry(first.key, first.type, first.data, Usage(seconds=100.0), 100.0)
    outcome = await run(spec("self_consistency", 1, budget={"seconds": 99}), ScriptedEngine(), MemoryJournal([spent]))
    assert outcome.result.finish_reason == "budget"
    assert outcome.usage.generated == 0


async def test_the_verifier_computes_each_step_of_a_beam_once() -> None:
    engine, journal = ScriptedEngine(), MemoryJournal()
    await run(spec("beam", 2), engine, journal)
    scored = [entry for entry in journal.entries if entry.type == "score"]
    assert scored
    assert all(len(entry.data["scores"]) == 1 for entry in scored)


@pytest.mark.parametrize("field", ["model", "verifier"])
async def test_an_unserved_model_is_refused_with_the_served_ones(field: str) -> None:
    named = {"model": "gpt"} if field == "model" else {"verifier": {"model": "gpt"}}
    with pytest.raises(InvalidRequest, match=r"'gpt' is not served; served are (policy|prm)"):
        await run(spec("beam", **named), ScriptedEngine())


async def test_a_problem_longer_than_the_context_is_refused_with_both_lengths() -> None:
    with pytest.raises(InvalidRequest, match=r"300 tokens.*256"):
        await run(spec("greedy", problem="x" * 300), ScriptedEngine())


@pytest.mark.parametrize("limit", [1, 7, 30])
async def test_max_tokens_bounds_a_whole_solution_in_every_strategy(limit: int) -> None:
    for name in NAMES:
        journal = MemoryJournal()
        await run(spec(name, 4, sampling={"max_tokens": limit}), ScriptedEngine(), journal)
        lengths: dict[str, int] = {"": 0}
        for entry in journal.entries:
            if entry.type == "node":
                above = 0 if entry.data.get("fresh") else lengths[entry.data["parent"]]
                lengths[entry.data["node"]] = above + entry.data["tokens"]
        assert max(lengths.values()) <= limit
