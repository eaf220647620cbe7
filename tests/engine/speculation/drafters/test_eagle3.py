"""Drafts of EAGLE-3 heads equal those of their published definition over the whole text, in both public formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion
from engine.scheduler.draft import EMPTY_DRAFT, Draft
from engine.speculation.control.controller import FixedController
from engine.speculation.drafter import DraftRequest, HiddenStateNeeds, StepResult
from engine.speculation.drafters import tree_draft
from engine.speculation.drafters.eagle3.head import load_eagle3
from tests.closeness import assert_rounded
from tests.engine.conftest import save_random_model
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.speculation.eagle3_heads import Eagle3Reference, Parts, eagle3_parts
from tests.engine.speculation.heads import Asked, Recorder, Target, check_drafts, save_head
from tests.engine.speculation.stub_drafters import Oracle
from tests.engine.speculation.test_exact import PROMPTS, answers, completions, requests
from tests.engine.ties import assert_same_tokens
from tests.long import mostly_long, mostly_long_grid
from tests.rounding import float32_bound

SHAPES = {"chain": (4, 4), "tree": (3, 10)}
DEFAULT_LAYERS = (2, 4, 5)
"""2, n / 2 and n - 3 of the targets' eight layers."""
THREE: dict[str, Any] = {"layers": None, "num_states": 3}
HEADS: dict[str, tuple[str, Sequence[int], dict[str, Any]]] = {
    "safeai": ("llama", DEFAULT_LAYERS, {"form": "safeai", **THREE}),
    "speculators": ("qwen3", DEFAULT_LAYERS, {**THREE, "norm_before_residual": True, "has_embedding": True}),
    "speculators of qwen3": (
        "qwen3",
        (1, 3, 6, 7),
        {
            "layers": (1, 3, 6, 7),
            "num_states": 4,
            "layer_type": "qwen3",
            "has_bias": True,
            "fc_norm": True,
            "norm_output": True,
        },
    ),
    "narrow": (
        "llama",
        (2, 6),
        {"layers": (2, 6), "num_states": 2, "hidden": 32, "has_embedding": True, "norm_before_fc": True},
    ),
    "modelopt": ("llama", DEFAULT_LAYERS, {"form": "modelopt", "layers": DEFAULT_LAYERS, "num_states": 3}),
}
"""Target, layers whose states are fused, and the head's description, of each head."""

Deep = Callable[[str], Path]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Deep:
    """``deep(family)`` returns the folder of a Llama, Qwen3 or Granite model with eight layers."""
    made: dict[str, Path] = {}
    architectures = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "granite": "GraniteForCausalLM"}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            options: dict[str, Any] = {"num_hidden_layers": 8, "initializer_range": 0.3}
            if family == "granite":
                options |= {"residual_multiplier": 0.3, "embedding_multiplier": 3.0, "attention_multiplier": 0.25}
            save_random_model(architectures[family], options, made[family])
        return made[family]

    return make


@pytest.fixture(autouse=True)
def _everything_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow all draft tokens, since random weights give each a low probability."""
    monkeypatch.setattr(tree_draft, "FLOOR", 0.0)


def drafting(
    folder: Path, head: Path, shape: tuple[int, int], options: EngineOptions = SMALL
) -> tuple[Harness, Recorder]:
    harness = Harness(folder, options)
    recorder = Recorder(load_eagle3(head, harness.core.model.decoder))
    harness.core.start_speculation(recorder, FixedController(*shape))
    return harness, recorder


def check(
    folder: Path, parts: Parts, layers: Sequence[int], made: Sequence[Asked], bias: Sequence[tuple[int, float]] = ()
) -> None:
    check_drafts(*(Eagle3Reference(folder, parts, layers, bias) for _ in range(2)), made)


def drafted(recorder: Recorder) -> list[Asked]:
    return [one for one in recorder.asked if one.draft != EMPTY_DRAFT]


@pytest.mark.parametrize(("name", "shape"), mostly_long_grid(HEADS, SHAPES, every=7))
def test_drafts_equal_those_of_the_head_over_the_whole_text(deep: Deep, tmp_path: Path, name: str, shape: str) -> None:
    """Several branches at once, whose prompts are prefilled in chunks."""
    check_over_whole_texts(deep, tmp_path, *HEADS[name], shape)


def test_a_head_reads_the_hidden_states_that_the_architecture_defines(deep: Deep, tmp_path: Path) -> None:
    """Our decoder computes scaled ones of Granite."""
    check_over_whole_texts(deep, tmp_path, "granite", *HEADS["safeai"][1:], "chain")


def check_over_whole_texts(
    deep: Deep, tmp_path: Path, family: str, layers: Sequence[int], description: dict[str, Any], shape: str
) -> None:
    folder, parts = deep(family), eagle3_parts(**description)
    options = replace(SMALL, step_tokens=32, page_size=8)
    harness, recorder = drafting(folder, save_head(tmp_path, *parts), SHAPES[shape], options)
    # Nothing is shared, not even a first token that two prompts happen to have: the last entry of a shared prefix is of
    # one of them. Other tests share pages.
    asked = [
        replace(request, branches=request.branches[:1], cache_salt=request.request_id) for request in requests("plain")
    ]
    ours, plain = (
        [event.token_ids for events in answers(each, asked) for event in events if isinstance(event, Completion)]
        for each in (harness, Harness(folder, SMALL))
    )
    assert_same_tokens(folder, asked, ours, plain)
    made = drafted(recorder)
    assert len(made) > 0.9 * len(recorder.asked) > 50
    check(folder, parts, layers, made[::5])


@pytest.mark.parametrize("shape", mostly_long(list(SHAPES), every=2))
def test_drafts_after_accepted_and_rejected_tokens_are_the_same(deep: Deep, tmp_path: Path, shape: str) -> None:
    """A distribution over few tokens, of which a head with random weights predicts some."""
    folder, parts = deep("qwen3"), eagle3_parts(**HEADS["speculators"][2])
    bias = tuple((token, 60.0) for token in (5, 17, 41, 90))
    harness, recorder = drafting(folder, save_head(tmp_path, *parts), SHAPES[shape])
    request = generate(PROMPTS[1], [Branch(3, 0, 60)], ignore_eos=True, temperature=4.0, logit_bias=bias)
    [one] = harness.complete(request)
    made = drafted(recorder)
    stats = harness.core.speculation_stats
    assert stats is not None
    assert 5 < stats.accepted < stats.drafted - 5
    assert_same_tokens(folder, [request], [one.token_ids], [Harness(folder, SMALL).complete(request)[0].token_ids])
    check(folder, parts, DEFAULT_LAYERS, made, bias)


def test_a_continued_branch_reuses_the_heads_cached_keys(deep: Deep, tmp_path: Path) -> None:
    folder, parts = deep("llama"), eagle3_parts(**HEADS["safeai"][2])
    harness, recorder = drafting(folder, save_head(tmp_path, *parts), (3, 3), replace(SMALL, page_size=8))
    first = harness.complete(generate(PROMPTS[2], [Branch(5, 0, 21)], ignore_eos=True))[0]
    recorder.asked.clear()
    again = harness.complete(generate(PROMPTS[2], [Branch(6, 0, 9, first.token_ids[:12])], ignore_eos=True))[0]
    assert again.cached_tokens == len(PROMPTS[2]) + 11
    made = drafted(recorder)
    assert len(made) >= 5
    check(folder, parts, DEFAULT_LAYERS, made)


def test_branches_that_share_pages_are_answered_exactly(deep: Deep, tmp_path: Path) -> None:
    """Forks and preemption; the last entry of a shared prefix may be another branch's."""
    folder, asked = deep("llama"), [replace(request, pin_key="a") for request in requests("plain", 40)]
    plain = answers(Harness(folder, SMALL), asked)
    tight = EngineOptions(kv_tokens=160, page_size=8, max_running=6, step_tokens=24)
    harness, recorder = drafting(folder, save_head(tmp_path, *eagle3_parts(**HEADS["safeai"][2])), (3, 10), tight)
    ours = answers(harness, asked)
    tokens, expected = ([one.token_ids for one in completions(some)] for some in (ours, plain))
    assert_same_tokens(folder, asked, tokens, expected)
    assert harness.core.stats.preemptions > 0
    assert len(drafted(recorder)) > 0.8 * len(recorder.asked)


class Observer(Oracle):
    """A drafter without drafts that keeps what it observes."""

    hidden_state_needs = HiddenStateNeeds.ALL
    observed_layers = DEFAULT_LAYERS

    def __init__(self) -> None:
        super().__init__({}, 0, 0.0)
        self.states: dict[int, Tensor] = {}

    def reset(self, cache: KVCache) -> None:
        self.states.clear()

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        return [EMPTY_DRAFT] * len(wishes)

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        for step in steps:
            positions = range(step.first_position, step.first_position + len(step.rows))
            self.states |= {place: hidden[row].clone() for place, row in zip(positions, step.rows, strict=True)}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("length", [5, 150])
def test_a_drafter_observes_the_hidden_states_after_its_layers(deep: Deep, family: str, length: int) -> None:
    """Steps of few tokens, which are recorded, and of more."""
    folder, observer = deep(family), Observer()
    harness = Harness(folder, SMALL)
    harness.core.start_speculation(observer, FixedController(1, 1))
    prompt = [3 + (7 * place) % 350 for place in range(length)]
    [one] = harness.complete(generate(prompt, [Branch(1, 0, 6)], ignore_eos=True))
    # The step that samples the last token finishes the branch, and so is not observed.
    text = [*prompt, *one.token_ids[:-2]]
    assert sorted(observer.states) == list(range(len(text)))
    ours = torch.stack([observer.states[place] for place in range(len(text))])
    exact = Target(folder)
    bound = float32_bound(lambda: exact.states(text, DEFAULT_LAYERS))
    assert_rounded(ours, exact.states(text, DEFAULT_LAYERS), bound)
