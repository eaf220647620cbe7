"""Thoughts on the real engine with the bundled policy that thinks: the limit, the bill, and what a probe costs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import InvalidRequest, TokenizeRequest
from prm.scorers import grades
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.tree import read_parts
from tests.long import mostly_long
from tests.reasoner.search.test_thoughts import check_parts, nodes_of, shape_of
from tests.specs import build_spec

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy-thinking"
QUESTION = "Make 68 with + - * / from the numbers 10, 12, 8 and 3, each used exactly once."
PLAIN = EngineOptions(kv_tokens=16_384, draft="off")


@asynccontextmanager
async def serving(options: EngineOptions) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine({"policy": POLICY}, options)
    try:
        yield engine
    finally:
        await engine.close()


async def solve(
    engine: LocalEngine, strategy: dict[str, object], journal: MemoryJournal | None = None, **more: object
) -> tuple[JobOutcome, MemoryJournal]:
    journal = MemoryJournal() if journal is None else journal
    fields = {"problem": QUESTION, "seed": 5, "strategy": strategy, "deterministic": True, "verifier": None}
    return await run_job(build_spec(fields | more), engine, journal), journal


@pytest.mark.parametrize("limit", mostly_long([0, 1, 23, 90], every=2))
async def test_a_thought_never_exceeds_its_limit_with_speculation_and_under_preemption(limit: int) -> None:
    shapes = []
    for options in (
        PLAIN,
        EngineOptions(kv_tokens=16_384, draft="ngram"),
        EngineOptions(kv_tokens=1024, draft="off", page_size=16),
    ):
        async with serving(options) as engine:
            budget = {"thinking_tokens": limit, "tokens": 4000}
            outcome, journal = await solve(engine, {"name": "self_consistency", "n": 8}, budget=budget)
        check_parts(journal, outcome, limit)
        assert outcome.usage.thought <= 8 * limit
        shapes.append(shape_of(journal))
    assert shapes[0] == shapes[1] == shapes[2]
    parts = [read_parts(entries[-1].data) for entries in nodes_of(journal).values()]
    injected = [part for each in parts for part in each if part.origin == "injected"]
    assert len(injected) > 4  # most thoughts meet the limit
    assert outcome.usage.generated > outcome.usage.thought


@pytest.mark.parametrize(
    "strategy", [{"name": "self_consistency", "n": 8}, {"name": "early_exit", "n": 2, "every": 64}]
)
async def test_thoughts_that_lose_keys_are_the_same_under_preemption_and_say_so_on_the_bill(
    strategy: dict[str, object],
) -> None:
    outcomes, shapes, settings = [], [], {"kv_budget": 128, "max_tokens": 600}
    for options in (PLAIN, EngineOptions(kv_tokens=1024, draft="off", max_running=8), replace(PLAIN, draft="ngram")):
        async with serving(replace(options, deterministic=True)) as engine:
            outcome, journal = await solve(engine, strategy, sampling=settings)
        outcomes.append(outcome)
        shapes.append(shape_of(journal))
    assert shapes[0] == shapes[1] == shapes[2]
    bills = [outcome.usage for outcome in outcomes]
    assert len({(bill.generated, bill.dropped) for bill in bills}) == 1
    assert bills[0].dropped > bills[0].thought / 4
    # Each request goes on where the one before it ended: a token, and what it injects.
    assert bills[0].cached > 0.95 * bills[0].prompt
    async with serving(PLAIN) as engine:
        replayed, _ = await solve(engine, strategy, journal, sampling=settings)
    assert (replayed.usage.generated, replayed.usage.dropped) == (bills[0].generated, bills[0].dropped)


@pytest.mark.parametrize("strategy", [{"name": "best_of_n", "n": 6}, {"name": "beam", "n": 4, "expansions": 2}])
async def test_grades_behind_thoughts_that_lost_keys_compute_their_questions_alone(
    strategy: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grades, "MIN_GRADE_MASS", 0.0)  # this policy was not trained to grade
    more: dict[str, object] = {
        "verifier": {"kind": "graded", "repeats": 2},
        "sampling": {"kv_budget": 128, "max_tokens": 600},
    }
    scores = []
    for options in (PLAIN, EngineOptions(kv_tokens=1024, draft="off", max_running=8)):
        async with serving(replace(options, deterministic=True)) as engine:
            outcome, journal = await solve(engine, strategy, **more)
            question = len(await engine.tokenize(TokenizeRequest("policy", [{"role": "user", "content": QUESTION}])))
        entries = [entry for entry in journal.entries if entry.type == "score"]
        scores.append({entry.key: (entry.data["score"], entry.data.get("grades")) for entry in entries})
        if options is PLAIN:
            assert outcome.usage.dropped > 200
            asked = [entry for entry in entries if entry.spend.verifier_computed]
            assert len(asked) > 3
            for entry in asked:
                branch = question + count_branch_tokens(journal, entry.data["node"])
                # An end of sequence is left out, and the last token before it may only be sampled.
                assert entry.spend.verifier_cached >= 2 * (branch - 2)
    assert scores[0] == scores[1]


def count_branch_tokens(journal: MemoryJournal, node: str) -> int:
    """Return the number of tokens of a node and its ancestors."""
    if not node:
        return 0
    entries = nodes_of(journal)[node]
    own = sum(len(entry.data["token_ids"]) for entry in entries)
    return own + count_branch_tokens(journal, entries[0].data["parent"])


async def test_keys_below_the_prompt_are_refused_before_a_token() -> None:
    async with serving(PLAIN) as engine:
        with pytest.raises(InvalidRequest, match="give 96 at least") as caught:
            await solve(engine, {"name": "greedy"}, sampling={"kv_budget": 50})
    assert caught.value.field == "kv_budget"


async def test_a_probe_costs_its_own_tokens_alone() -> None:
    async with serving(PLAIN) as engine:
        strategy = {"name": "early_exit", "n": 2, "every": 64, "window": 16}
        _, journal = await solve(engine, strategy, sampling={"max_tokens": 400})
    nodes = {name: entries[0] for name, entries in nodes_of(journal).items()}
    probes = [entry for entry in nodes.values() if entry.data["parent"] and _is_request(nodes[entry.data["parent"]])]
    assert len(probes) >= 4
    for probe in probes:
        request = nodes[probe.data["parent"]]
        injected = sum(part.num_tokens for part in read_parts(request.data))
        thought = probe.spend.prompt - injected
        assert probe.spend.cached >= 0.95 * thought


def _is_request(entry: Entry) -> bool:
    return entry.data["reason"] == "said"


@pytest.mark.parametrize("strategy", [{"name": "revise", "n": 4}, {"name": "aggregate"}])
async def test_a_budget_of_the_question_leaves_later_conversations_the_same_room(strategy: dict[str, object]) -> None:
    async with serving(EngineOptions(kv_tokens=32_768, draft="off")) as engine:
        sampling = {"kv_budget": 160, "max_tokens": 300, "temperature": 1.3}
        _, journal = await solve(engine, strategy, sampling=sampling)
    reasons = [entries[-1].data["reason"] for entries in nodes_of(journal).values() if "reason" in entries[-1].data]
    assert len(reasons) > 4
    assert "refused" not in reasons
