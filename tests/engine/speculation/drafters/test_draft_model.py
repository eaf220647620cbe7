"""Draft models: their cache follows the branches, shares their prefixes, and never blocks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.protocol.types import Branch, Completion, GenerateRequest
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL, generate, qwen3_for
from tests.engine.speculation.drafters.draft_models import (
    LAW,
    PENALISED,
    PROMPT,
    TIGHT,
    cached,
    complete,
    counts,
    plain,
    speculating,
    texts,
)
from tests.engine.ties import assert_same_tokens


@pytest.fixture
def _all_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.speculation.drafters.proposal.NOISE", 1.0)


def requests(law: dict[str, object], namespace: str | None = None) -> list[GenerateRequest]:
    """Return siblings, a prompt that diverges from theirs within a page, a short one, and a branch that was cut."""
    prompts = [PROMPT, [*PROMPT[:41], *range(200, 230)], PROMPT[:5]]
    asked = [
        generate(prompt, [Branch(4, key, 30) for key in range(3)], request_id=str(number), cache_salt=namespace, **law)
        for number, prompt in enumerate(prompts)
    ]
    cut = [Branch(4, 9, 20, generated=tuple(range(100, 150)))]
    return [*asked, generate(PROMPT, cut, request_id="cut", cache_salt=namespace, **law)]


def same_tokens(
    folder: Path,
    asked: Sequence[GenerateRequest],
    answers: Sequence[Sequence[Completion]],
    expected: Sequence[Sequence[Sequence[int]]],
    kv_dtype: str = "auto",
) -> None:
    ours, theirs = ([one.token_ids for some in answers for one in some], [one for some in expected for one in some])
    assert_same_tokens(folder, asked, ours, theirs, kv_dtype)


@pytest.mark.parametrize(
    ("family", "law"),
    [
        ("qwen3", LAW),
        ("qwen3", PENALISED),
        ("qwen3", LAW | {"temperature": 0.0}),
        ("mistral", LAW),
        ("gemma2", LAW),
        ("mixtral", LAW),
        ("olmo2", PENALISED),
    ],
    ids=lambda value: value if isinstance(value, str) else "penalties" if value is PENALISED else None,
)
@pytest.mark.usefixtures("_all_noise")
def test_the_target_as_its_own_draft_model_is_always_accepted(
    checkpoints: Checkpoints, family: str, law: dict[str, object]
) -> None:
    folder = checkpoints(family)
    asked = requests(law | {"stop_token_ids": ()})
    harness, drafter = speculating(folder, folder, depth=5, nodes=5)
    answers = complete(harness, drafter, asked)
    same_tokens(folder, asked, answers, plain(folder, asked))
    drafted, accepted = counts(harness)
    assert drafted == accepted > 150


@pytest.mark.parametrize(
    ("kv_dtype", "kv_bytes_per_token"), [("auto", 512), ("int8", 160), ("fp8", 160), ("int4", 144)]
)
@pytest.mark.usefixtures("_all_noise")
def test_all_drafts_are_accepted_under_preemption_and_with_a_small_pool_of_the_drafter(
    checkpoints: Checkpoints, kv_dtype: str, kv_bytes_per_token: int
) -> None:
    folder, options = checkpoints(qwen3_for(kv_dtype)), replace(TIGHT, kv_dtype=kv_dtype)
    asked = [generate(PROMPT[:37], [Branch(5, key, 60) for key in range(8)], **LAW)]
    expected = plain(folder, asked, replace(SMALL, kv_dtype=kv_dtype))
    for pool_bytes, pages in ((1 << 28, 20), (8 * 16 * kv_bytes_per_token, 8)):
        harness, drafter = speculating(folder, folder, options=options, pool_bytes=pool_bytes)
        assert drafter.cache.pool.size == pages
        answers = complete(harness, drafter, asked)
        assert harness.core.stats.preemptions > 0
        same_tokens(folder, asked, answers, expected, kv_dtype)
        drafted, accepted = counts(harness)
        assert drafted == accepted > 20


def test_another_draft_model_changes_no_token_and_is_accepted_in_part(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen3")
    asked = requests(LAW) + requests(LAW, "other")
    expected = plain(folder, asked)
    chains = speculating(folder, checkpoints("llama"))
    answers = complete(*chains, asked)
    same_tokens(folder, asked, answers, expected)
    trees = speculating(folder, checkpoints("llama"), depth=4, nodes=12)
    answers = complete(*trees, asked)
    same_tokens(folder, asked, answers, expected)
    drafted, accepted = (one + other for one, other in zip(counts(trees[0]), counts(chains[0]), strict=True))
    assert 0 < accepted < drafted


def test_only_tokens_of_branches_are_cached_and_only_within_their_namespace(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"), depth=6, nodes=6)
    for namespace in (None, "one", "two"):
        asked = requests(LAW, namespace)
        answers = complete(harness, drafter, asked)
        known = [text for request, some in zip(asked, answers, strict=True) for text in texts(request, some)]
        found = cached(drafter, namespace)
        assert found
        assert all(any(path == text[: len(path)] for text in known) for path in found)
        # Each branch is cached except for the tokens sampled in its last step.
        assert all(any(path[: len(text) - 7] == text[:-7] for path in found) for text in known)
    assert drafter.cache.num_tables == 0
    assert set(drafter.cache.tree.roots) == {None, "one", "two"}


def test_clearing_the_cache_clears_the_drafters_cache(checkpoints: Checkpoints) -> None:
    harness, drafter = speculating(checkpoints("qwen3"), checkpoints("llama"))
    complete(harness, drafter, requests(LAW))
    assert cached(drafter)
    harness.core.clear_cache()
    drafter.cache.check()
    assert drafter.cache.tree.roots == harness.core.cache.tree.roots
    assert drafter.cache.pool.num_free == drafter.cache.pool.size


# Drafters driven without an engine.
