"""Drafts for branches whose thoughts lose pages: exact, and only from what such a branch has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.protocol.options import EngineOptions
from engine.protocol.types import Completion, KeyBound
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import HiddenStateNeeds
from tests.engine.conftest import Checkpoints
from tests.engine.core.test_kv_budget import BRANCHES, BUDGET, LAW, PROMPT, PURE, exact_bounded_logprobs, same
from tests.engine.exact import float32_loss
from tests.engine.helpers import Harness, generate
from tests.engine.speculation.stub_drafters import Oracle
from tests.engine.speculation.test_exact import SHAPES, VOCAB


class TokenOracle(Oracle):
    """An oracle that needs no hidden states, as n-grams and draft models do not."""

    hidden_state_needs = HiddenStateNeeds.NONE


def start_oracle(harness: Harness, right: float, plain: list[Completion], *, shape: str, kind: type[Oracle]) -> None:
    known = {
        (branch.seed, branch.key, len(PROMPT) + place): token
        for branch, one in zip(BRANCHES, plain, strict=True)
        for place, token in enumerate(one.token_ids)
    }
    harness.core.start_speculation(kind(known, VOCAB, right), FixedController(*SHAPES[shape]))


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_drafts_of_bounded_branches_change_no_bit_and_no_drop(checkpoints: Checkpoints, right: float) -> None:
    folder = checkpoints("qwen3")
    request = generate(PROMPT, BRANCHES, **LAW)
    plain = Harness(folder, PURE).complete(request)
    for options in (PURE, EngineOptions(kv_tokens=288, max_running=4, deterministic=True)):
        harness = Harness(folder, options)
        start_oracle(harness, right, plain, shape="chain", kind=TokenOracle)
        found = harness.complete(request)
        assert same(found, plain)
        assert [one.dropped_tokens for one in found] == [one.dropped_tokens for one in plain]
        accepted = sum(one.accepted_tokens for one in found)
        assert (accepted > 0.6 * len(BRANCHES) * 200) if right == 1 else (accepted == 0) if right == 0 else accepted > 0
    assert harness.core.stats.preemptions > 0


@pytest.mark.parametrize("shape", list(SHAPES))
def test_accepted_drafts_see_the_pages_that_are_kept_at_their_positions(checkpoints: Checkpoints, shape: str) -> None:
    folder = checkpoints("qwen3")
    request = generate(PROMPT, BRANCHES, **LAW | {"temperature": 1.0, "logprobs": 0})
    harness = Harness(folder)
    start_oracle(harness, 0.9, Harness(folder).complete(request), shape=shape, kind=TokenOracle)
    for branch, found in zip(BRANCHES, harness.complete(request), strict=True):
        assert found.accepted_tokens > 40
        tokens = (*PROMPT, *found.token_ids)
        rows = range(len(PROMPT) - 1, len(tokens) - 1)
        exact = exact_bounded_logprobs(folder, tokens, KeyBound(BUDGET, len(PROMPT), seed=branch.seed))
        assert found.logprobs is not None
        ours = torch.tensor([one.logprob for one in found.logprobs], dtype=torch.float64)
        assert float((ours - exact[rows, found.token_ids]).abs().max()) <= float32_loss(folder).logprob


def test_n_grams_draft_for_bounded_branches_and_drafters_with_pages_only_for_their_neighbours(
    checkpoints: Checkpoints,
) -> None:
    folder = checkpoints("qwen3")
    bounded = generate((*PROMPT[:20], *PROMPT[:20]), BRANCHES, **LAW | {"temperature": 0.3})
    plain = replace(bounded, sampling=replace(bounded.sampling, kv_budget=None), branches=bounded.branches[:2])
    expected = [Harness(folder, PURE).complete(request) for request in (bounded, plain)]
    for has_pages in (False, True):
        harness = Harness(folder, replace(PURE, draft="off" if has_pages else "ngram"))
        if has_pages:
            start_oracle(harness, 0.5, expected[0], shape="chain", kind=Oracle)
        events = [harness.submit(bounded), harness.submit(plain)]
        harness.run()
        found = [sorted(each, key=lambda one: one.index) for each in events]  # type: ignore[union-attr]
        assert [same(*pair) for pair in zip(found, expected, strict=True)] == [True, True]  # type: ignore[arg-type]
        drafted = [sum(one.drafted_tokens for one in each) for each in found]  # type: ignore[union-attr]
        assert [count > 0 for count in drafted] == [not has_pages, True]
