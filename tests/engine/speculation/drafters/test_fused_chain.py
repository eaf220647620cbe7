"""A chain drafted in one call equals the chain drafted level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.models.load import load_model
from engine.protocol.options import EngineOptions
from engine.protocol.types import GenerateRequest
from engine.sampling.sampler import Floats, Ints
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters import draft_model, fused_chain
from engine.speculation.drafters.draft_model import DraftModel
from engine.speculation.drafters.fused_chain import ChainStart, FusedChains
from engine.speculation.drafters.proposal import DraftSampler
from tests.engine.conftest import Checkpoints
from tests.engine.exact import float32_loss
from tests.engine.helpers import SMALL, Harness
from tests.engine.speculation.heads import Asked, Recorder, assert_same_drafts
from tests.engine.speculation.test_exact import answers, completions, requests, same
from tests.long import mostly_long, mostly_long_grid

CONTEXT = 256
SHAPES = {"one guess": (1, 1), "chain": (5, 5), "tree": (4, 7)}


class Counted:
    """Counts of the chains drafted in one call, and of their input tokens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.chains: list[list[int]] = []
        self.shapes: list[int] = []
        """Number of recorded shapes after each call."""
        self.depths: list[int] = []
        original = FusedChains.__call__

        def call(
            chains: FusedChains, starts: Sequence[ChainStart], guesses: DraftSampler, depth: int, width: int
        ) -> tuple[Ints, Floats]:
            self.chains.append([len(start.due) for start in starts])
            self.shapes.append(len(chains._known))
            self.depths.append(depth)
            return original(chains, starts, guesses, depth, width)

        patch.setattr(FusedChains, "__call__", call)


class Changing(FixedController):
    """Chains of varying depth."""

    def choose_sizes(
        self, sequences: Sequence[GenerateSequence], others: int, rested: int, /
    ) -> Sequence[tuple[int, int]]:
        found = super().choose_sizes(sequences, others, rested)
        cut = len(sequences[0].tokens) % 3
        return [(depth - cut, nodes - cut) for depth, nodes in found]


def drafts(
    target: Path,
    draft: Path,
    asked: Sequence[GenerateRequest],
    shape: tuple[int, int],
    options: EngineOptions,
    kind: type[FixedController] = FixedController,
) -> list[Asked]:
    """Return the requests to a draft model and its drafts; check that the results are those of plain decoding."""
    harness = Harness(target, options)
    recorder = Recorder(DraftModel(load_model(draft, lambda _: CONTEXT), context=CONTEXT))
    harness.core.start_speculation(recorder, kind(*shape))
    plain = completions(answers(Harness(target, options), asked))
    same(asked, completions(answers(harness, asked)), plain, target, options.kv_dtype)
    return recorder.asked


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("law", mostly_long(["greedy", "plain", "filters"], every=2))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_fused_chain_equals_the_chain_drafted_level_by_level(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, family: str, law: str, shape: str
) -> None:
    """Branches of several prompts, one of them a single token."""
    folder, draft, asked = checkpoints("qwen3"), checkpoints(family), requests(law)
    asked.append(replace(asked[0], request_id="short", prompt=(7,)))
    counted = Counted(monkeypatch)
    at_once = drafts(folder, draft, asked, SHAPES[shape], SMALL)
    assert len(counted.chains) >= 4
    assert {count for counts in counted.chains for count in counts} == {1, 2}
    counted.chains.clear()
    monkeypatch.setattr(draft_model, "supports_fused_chains", lambda *_: False)
    by_level = drafts(folder, draft, asked, SHAPES[shape], SMALL)
    assert not counted.chains
    # A logit errs, and the sum that its exponential is divided by.
    assert_same_drafts(at_once, by_level, 2 * float32_loss(draft).logit)


@pytest.mark.parametrize("shape", [(4, 4), (4, 7)])
def test_shorter_chains_reuse_the_recording_of_longer_ones(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    folder, draft, asked = checkpoints("qwen3"), checkpoints("llama"), requests("plain")
    counted = Counted(monkeypatch)
    at_once = drafts(folder, draft, asked, shape, SMALL, Changing)
    assert {2, 3, 4} <= set(counted.depths)
    assert any(shallow < deep for deep, shallow in pairwise(counted.depths))
    monkeypatch.setattr(draft_model, "supports_fused_chains", lambda *_: False)
    by_level = drafts(folder, draft, asked, shape, SMALL, Changing)
    assert_same_drafts(at_once, by_level, 2 * float32_loss(draft).logit)


def test_a_fused_chain_over_8_bit_keys_equals_the_chain_drafted_level_by_level(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, draft, asked = checkpoints("qwen3"), checkpoints("llama"), requests("plain")
    options = replace(SMALL, kv_dtype="int8")
    counted = Counted(monkeypatch)
    at_once = drafts(folder, draft, asked, (4, 4), options)
    assert len(counted.chains) >= 5
    monkeypatch.setattr(draft_model, "supports_fused_chains", lambda *_: False)
    by_level = drafts(folder, draft, asked, (4, 4), options)
    agreed = [one.draft.tokens == other.draft.tokens for one, other in zip(at_once, by_level, strict=True)]
    assert sum(agreed) >= 0.98 * len(agreed)  # values rounded to 8 bits may change a sample


@pytest.mark.parametrize(("threads", "page_size"), mostly_long_grid([1, 2], [4, 16], every=3))
def test_fused_chains_of_the_target_as_its_own_draft_model_are_always_accepted(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, page_size: int, threads: int
) -> None:
    monkeypatch.setattr("engine.speculation.drafters.proposal.NOISE", 1.0)
    counted = Counted(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = drafts(
            checkpoints("qwen3"),
            checkpoints("qwen3"),
            requests("filters", length=40),
            (4, 4),
            replace(SMALL, page_size=page_size),
        )
    finally:
        torch.set_num_threads(before)
    assert len(counted.chains) >= 5
    tokens = {(*one.tokens[:3], one.key, at): token for one in made for at, token in enumerate(one.tokens)}
    met = [
        tokens[place] == token
        for one in made
        for ahead, token in enumerate(one.draft.tokens)
        if (place := (*one.tokens[:3], one.key, len(one.tokens) + ahead)) in tokens
    ]
    assert len(met) > 200
    assert all(met)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt2", "mixtral"])
def test_models_that_cannot_be_recorded_draft_level_by_level(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    counted = Counted(monkeypatch)
    made = drafts(checkpoints("qwen3"), checkpoints(family), requests("plain"), (3, 3), SMALL)
    assert sum(len(one.draft) for one in made) > 100
    assert not counted.chains


def test_the_number_of_recorded_shapes_is_bounded(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_chain, "_SHAPES", 3)
    counted = Counted(monkeypatch)
    made = drafts(checkpoints("qwen3"), checkpoints("qwen3"), requests("plain", length=40), (5, 5), SMALL)
    assert sum(len(one.draft) for one in made) > 100
    assert len(counted.chains) > 5
    assert max(counted.shapes) == 3


def test_page_layouts_that_the_kernel_does_not_support_draft_level_by_level(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, options = Counted(monkeypatch), replace(SMALL, page_size=32)
    made = drafts(checkpoints("qwen3"), checkpoints("llama"), requests("plain"), (3, 3), options)
    assert sum(len(one.draft) for one in made) > 100
    assert not counted.chains


def test_penalties_count_draft_tokens_level_by_level(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    made = drafts(checkpoints("qwen3"), checkpoints("llama"), requests("penalties"), (3, 3), SMALL)
    assert sum(len(one.draft) for one in made) > 100
    assert not counted.chains
