"""Adapters and the lower tier: pages come back for whoever may read them, the base, its adapter, or an invocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.protocol.types import Branch, Completion, ScoreItem
from tests.engine.adapters.lora import INVOCATION, create_harness, save_adapter
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate, score
from tests.engine.offloading.test_engine import FIRST, LARGE, PROMPT, SMALL, closing, create_prompt, flush
from tests.engine.offloading.tiers import FreeLoads

SEARCHES = 6


@pytest.fixture(autouse=True)
def _loading_is_always_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.step.Costs", FreeLoads)


def think(harness: Harness, model: str) -> list[Sequence[int]]:
    """Let a model write a branch for each search; return all tokens of each."""
    found: list[Sequence[int]] = []
    for search in range(SEARCHES):
        key = f"{model} {search}"
        request = generate(create_prompt(search), [Branch(search, 0, FIRST)], model=model, pin_key=key, ignore_eos=True)
        [completion] = harness.complete(request)
        found.append((*create_prompt(search), *map(int, completion.token_ids)))
    return found


def go_on(harness: Harness, model: str, tokens: Sequence[int]) -> Completion:
    [completion] = harness.complete(generate(tokens, [Branch(1, 1, 4)], model=model, ignore_eos=True))
    return completion


def test_an_activated_adapter_judges_a_branch_of_the_base_that_was_evicted(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("qwen3")
    judge = save_adapter(tmp_path / "judge", base, alora_invocation_tokens=list(INVOCATION))
    large = create_harness(base, {"judge": judge}, LARGE)
    branches = think(large, "m")
    items = [
        score(ScoreItem(((*branch, *INVOCATION),), (0,)), model="judge", token_ids=range(20)) for branch in branches
    ]
    expected = [large.score(item)[0] for item in items]
    with closing(create_harness(base, {"judge": judge}, replace(SMALL, cache_disk=str(tmp_path / "disk")))) as small:
        assert think(small, "m") == branches
        flush(small)
        ours = [small.score(item)[0] for item in items]
    assert [one.values for one in ours] == [one.values for one in expected]
    assert {(one.computed_tokens, one.cached_tokens) for one in ours} == {(1 + len(INVOCATION), PROMPT + FIRST - 1)}


def test_pages_of_an_adapter_come_back_for_it_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("qwen3")
    style = save_adapter(tmp_path / "style", base)
    large = create_harness(base, {"style": style}, LARGE)
    branches = think(large, "style")
    expected = [go_on(large, model, branch) for branch in branches for model in ("style", "m")]
    with closing(create_harness(base, {"style": style}, replace(SMALL, cache_disk=str(tmp_path / "disk")))) as small:
        assert think(small, "style") == branches
        flush(small)
        ours = [go_on(small, model, branch) for branch in branches for model in ("style", "m")]
    assert [one.token_ids for one in ours] == [one.token_ids for one in expected]
    assert [one.cached_tokens for one in ours] == [PROMPT + FIRST - 1, 0] * SEARCHES
