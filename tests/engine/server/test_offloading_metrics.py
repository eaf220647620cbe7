"""Prometheus metrics of the cache's lower tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from engine.core.local_engine import LocalEngine
from engine.offloading.costs import Costs
from engine.server.metrics import EngineCollector
from tests.engine.conftest import Checkpoints
from tests.engine.offloading.test_engine import FIRST, PROMPT, SEARCHES, SECOND, SMALL, complete, create_prompt


async def test_metrics_count_what_goes_down_and_comes_back(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Costs, "is_load_cheaper", lambda *_, **__: True)
    engine = LocalEngine({"m": checkpoints("qwen3")}, replace(SMALL, cache_disk=str(tmp_path)))
    try:
        parked = [await complete(engine, search, create_prompt(search), FIRST) for search in range(SEARCHES)]
        await complete(engine, 0, (*create_prompt(0), *parked[0]), SECOND)
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        numbers = {
            name: registry.get_sample_value(f"reasoner_engine_offload_{name}", {"model": "m"})
            for name in ("pages_written_total", "pages_loaded_total", "tokens_loaded_total", "pages_lost_total")
        }
        assert numbers["pages_written_total"]
        assert numbers["pages_loaded_total"] == 6
        assert numbers["tokens_loaded_total"] == PROMPT + FIRST - 1
        assert numbers["pages_lost_total"] == 0
    finally:
        await engine.close()
