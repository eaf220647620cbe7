"""A search that waits while others fill the cache goes on from disk, with the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.local_engine import LocalEngine
from engine.offloading.costs import Costs
from engine.offloading.stats import OffloadingStats
from engine.protocol.options import EngineOptions
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import open_search, run_job
from tests.specs import build_spec

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
QUESTION = "Make {} with + - * / from the numbers 10, 12, 8 and 3, each used exactly once."


async def search_with_a_pause(
    options: EngineOptions, num_others: int
) -> tuple[list[str], Usage, OffloadingStats | None]:
    """Return the solutions of a search that stops after two steps, while others run, its bill, and what went
    to disk and came back."""
    engine = LocalEngine({"policy": POLICY}, options)
    fields = {"prompt": "{problem}", "verifier": None, "deterministic": True}
    try:
        spec = build_spec(
            {**fields, "problem": QUESTION.format(68), "seed": 1, "strategy": {"name": "self_consistency"}}
        )
        async with open_search(spec, engine, MemoryJournal()) as search:
            parents = [search.root]
            for width in (4, 1):
                async for _ in search.expand(parents, width):
                    pass
                parents = [child for parent in parents for child in parent.children if child.open]
            for number in range(num_others):
                strategy = {"name": "self_consistency", "n": 16}
                other = {**fields, "problem": QUESTION.format(70 + number), "seed": number, "strategy": strategy}
                await run_job(build_spec(other), engine, MemoryJournal())
            async for _ in search.complete(parents, 2):
                pass
            texts = [child.text for node in parents for child in node.children]
        return texts, search.ledger.usage, engine.stats()["policy"].offloading
    finally:
        await engine.close()


async def test_a_search_that_waited_goes_on_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "is_load_cheaper", lambda *_, **__: True)
    ample = EngineOptions(kv_tokens=32_768, draft="off", deterministic=True)
    scarce = EngineOptions(kv_tokens=768, draft="off", deterministic=True)
    texts, bill, _ = await search_with_a_pause(ample, 0)
    assert len(texts) >= 4
    computed, computed_bill, _ = await search_with_a_pause(scarce, 3)
    options = EngineOptions(kv_tokens=768, draft="off", deterministic=True, cache_disk=str(tmp_path))
    loaded, loaded_bill, stats = await search_with_a_pause(options, 3)
    assert texts == computed == loaded
    assert bill.generated == loaded_bill.generated
    assert computed_bill.cached < loaded_bill.cached <= bill.cached
    assert stats is not None
    assert stats.tokens_loaded > 0
