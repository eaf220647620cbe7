"""Tests on servers of others are skipped, with the server's version and flags, where it does not compute its model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from tests.engine.remote.mock_vllm import MockVllm
from tests.listening import listening
from tests.vllm.computing import find_difference, skip_unless_it_computes

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
KEY = "a-secret-of-the-tests"


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    local = LocalEngine({"policy": POLICY}, EngineOptions(kv_tokens=4096, draft="off"))
    yield local
    asyncio.run(local.close())


def test_a_server_that_computes_its_model_is_used(engine: LocalEngine, tmp_path: Path) -> None:
    with listening(MockVllm(engine, "policy").app, tmp_path / "s") as url:
        assert asyncio.run(find_difference(url, "policy", POLICY)) is None
        skip_unless_it_computes(url, "policy", POLICY)


@pytest.mark.parametrize("honest", [0, 3, 20])
def test_a_test_on_a_server_that_writes_nonsense_is_skipped_with_its_version(
    engine: LocalEngine, tmp_path: Path, honest: int
) -> None:
    with listening(MockVllm(engine, "policy", honest, key=KEY).app, tmp_path / "s") as url:
        reason = f"vllm 0.32.0, max_model_len 256 does not compute the model: after {honest} tokens"
        with pytest.raises(pytest.skip.Exception, match=reason) as skipped:
            skip_unless_it_computes(url, "policy", POLICY, api_key=KEY)
    assert KEY not in str(skipped.value)


def test_a_server_of_a_small_context_is_compared_by_a_shorter_text(engine: LocalEngine, tmp_path: Path) -> None:
    with listening(MockVllm(engine, "policy", 8, entry={"max_model_len": 64}).app, tmp_path / "s") as url:
        difference = asyncio.run(find_difference(url, "policy", POLICY))
    assert difference is not None
    assert difference.place == 8
