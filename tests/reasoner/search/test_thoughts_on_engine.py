"""Thoughts on the real engine with the bundled policy that thinks: the limit, the bill, and what a probe costs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
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


async def solve(engine: LocalEngine, strategy: dict[str, object], **more: object) -> tuple[JobOutcome, MemoryJournal]:
    journal = MemoryJournal()
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
