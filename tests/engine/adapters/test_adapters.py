"""LoRA adapters in the engine: exact, several in one batch, never mixed in the cache, and without effect on others."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.protocol.types import Branch, Completion, ScoreItem
from tests.engine.adapters.lora import assert_adapted, create_harness, exact_logprobs, save_adapter
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import EmulatedGraph, emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.long import mostly_long
from tests.seeds import shift

VOCAB = 400
EXACT = replace(SMALL, deterministic=True, debug=True)
_RANDOM = random.Random(shift(5))
TEXT = tuple(_RANDOM.choices(range(10, 360), k=60))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stable": {"use_rslora": True, "rank": 9, "modules": ("q_proj", "v_proj", "down_proj"), "seed": 1},
    "patterns": {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"up_proj": 5}, "rank": 6, "seed": 2},
    "expression": {"target_modules": r".*layers\.1\..*(k_proj|o_proj)", "rank": 17, "seed": 3},
    "layers": {"layers_to_transform": [0], "exclude_modules": ["o_proj"], "seed": 4},
}


@pytest.fixture
def adapters(checkpoints: Checkpoints, tmp_path: Path) -> dict[str, Path]:
    """Return adapters of qwen3 with different ranks and modules, by name."""
    base = checkpoints("qwen3")
    return {name: save_adapter(tmp_path / name, base, **fields) for name, fields in SETTINGS.items()}


def read_logits(harness: Harness, model: str, tokens: Sequence[int] = TEXT) -> Tensor:
    """Return the logits after every token."""
    item = ScoreItem(tuple((token,) for token in tokens), tuple(range(len(tokens))))
    [result] = harness.score(score(item, model=model, token_ids=range(VOCAB)))
    return torch.tensor(result.values)


def complete(
    harness: Harness, models: Sequence[str], *, at_once: bool = True, size: int = 24
) -> dict[str, list[Completion]]:
    """Return the completions of the same request to several models, which run together or one after the other."""
    found: dict[str, list[Completion]] = {}
    events = {}
    for model in models:
        branches = [Branch(shift(3), key, size + 5 * key) for key in range(3)]
        request = generate(TEXT, branches, model=model, request_id=model, ignore_eos=True, temperature=0.8, logprobs=0)
        events[model] = harness.submit(request)
        if not at_once:
            harness.run()
    harness.run()
    for model, own in events.items():
        done = [event for event in own if isinstance(event, Completion)]
        found[model] = sorted(done, key=lambda one: one.index)
    return found


def tokens_of(completions: Mapping[str, list[Completion]]) -> dict[str, list[tuple[Any, ...]]]:
    return {name: [(one.token_ids, one.logprobs) for one in own] for name, own in completions.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_the_definition_in_float64(
    name: str, adapters: dict[str, Path], checkpoints: Checkpoints
) -> None:
    harness = create_harness(checkpoints("qwen3"), adapters)
    assert_adapted(read_logits(harness, name), checkpoints("qwen3"), adapters[name], TEXT)


@pytest.mark.parametrize(
    ("kind", "modules"),
    mostly_long(
        [
            ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
            ("qwen3_5", ("q_proj", "in_proj_qkv", "in_proj_b", "out_proj", "up_proj")),
            ("llama_bias", ("q_proj", "v_proj", "down_proj")),
            ("gemma2", ("k_proj", "gate_proj")),
            ("olmo3", ("k_proj", "o_proj")),
        ],
        every=2,
    ),
)
def test_other_families_are_exact_too(
    kind: str, modules: tuple[str, ...], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path / "a", checkpoints(kind), modules=modules)
    harness = create_harness(checkpoints(kind), {"a": folder})
    assert_adapted(read_logits(harness, "a"), checkpoints(kind), folder, TEXT)


def test_branches_without_an_adapter_keep_their_bits(adapters: dict[str, Path], checkpoints: Checkpoints) -> None:
    base = checkpoints("qwen3")
    alone = tokens_of(complete(Harness(base, EXACT), ["m"]))
    mixed = complete(create_harness(base, adapters, EXACT), ["plain", "m", "stable", "layers"])
    assert tokens_of({"m": mixed["m"]}) == alone


def test_branches_of_several_adapters_in_one_batch_have_the_bits_that_each_has_alone(
    adapters: dict[str, Path], checkpoints: Checkpoints
) -> None:
    base, names = checkpoints("qwen3"), [*SETTINGS, "m"]
    together = complete(create_harness(base, adapters, EXACT), names)
    for name in names:
        assert tokens_of(complete(create_harness(base, adapters, EXACT), [name]))[name] == tokens_of(together)[name]
    assert len({tuple(one.token_ids for one in own) for own in together.values()}) == len(names)


def test_cached_prefixes_are_those_of_the_same_adapter_and_change_no_bit(
    adapters: dict[str, Path], checkpoints: Checkpoints
) -> None:
    harness = create_harness(checkpoints("qwen3"), adapters, EXACT)
    first = complete(harness, ["m", "plain", "stable"], at_once=False)
    again = complete(harness, ["stable", "m", "plain"], at_once=False)
    assert tokens_of(again) == tokens_of(first)
    assert all(own[0].cached_tokens == 0 for own in first.values())
    assert all(one.cached_tokens == len(TEXT) - 1 for own in again.values() for one in own)


def test_preempted_branches_with_adapters_go_on_with_the_same_bits(
    adapters: dict[str, Path], checkpoints: Checkpoints
) -> None:
    base, names = checkpoints("qwen3"), ["m", "plain", "patterns"]
    roomy = complete(create_harness(base, adapters, EXACT), names, size=60)
    tight = create_harness(base, adapters, replace(EXACT, kv_tokens=288, step_tokens=32))
    assert tokens_of(complete(tight, names, size=60)) == tokens_of(roomy)
    assert tight.core.stats.preemptions > 0


def test_speculation_changes_no_token_of_an_adapter(adapters: dict[str, Path], checkpoints: Checkpoints) -> None:
    base, names = checkpoints("qwen3"), ["m", "plain", "stable"]
    plain = complete(create_harness(base, adapters, EXACT), names, size=60)
    drafting = create_harness(base, adapters, replace(EXACT, draft=f"draft_model={base}"))
    found = complete(drafting, names, size=60)
    assert [one.token_ids for own in found.values() for one in own] == [
        one.token_ids for own in plain.values() for one in own
    ]
    assert sum(one.accepted_tokens for one in found["m"]) > sum(one.accepted_tokens for one in found["plain"])


def test_chunks_and_long_steps_are_exact_too(adapters: dict[str, Path], checkpoints: Checkpoints) -> None:
    base, text = checkpoints("qwen3"), tuple(random.Random(shift(6)).choices(range(10, 360), k=230))
    for step_tokens in (512, 48):  # launched one by one, and from recordings
        harness = create_harness(base, adapters, replace(SMALL, step_tokens=step_tokens))
        assert_adapted(read_logits(harness, "stable", text), base, adapters["stable"], text)


def test_steps_without_adapters_replay_the_recordings_that_they_replay_without_them(
    adapters: dict[str, Path], checkpoints: Checkpoints
) -> None:
    base = checkpoints("qwen3")
    harness, plain = create_harness(base, adapters), Harness(base)
    for one in (harness, plain):
        complete(one, ["m"])
    forward, expected = harness.core.runner.forward, plain.core.runner.forward
    lengths = {key: len(graph) for key, (graph, _) in expected.graphs._graphs.items()}  # type: ignore[attr-defined]
    assert {key: len(graph) for key, (graph, _) in forward.graphs._graphs.items()} == lengths  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["plain", "stable"])
def test_the_path_of_a_gpu_is_exact_from_graphs_and_without(
    name: str, adapters: dict[str, Path], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoints("qwen3")
    emulate_gpu(monkeypatch)
    harness = create_harness(base, adapters, SMALL)
    assert isinstance(harness.core.model.decoder, Decoder)
    assert harness.core.model.decoder.is_capturable
    for _ in range(3):
        assert_adapted(read_logits(harness, name), base, adapters[name], TEXT)
        harness.core.clear_cache()
    found = complete(harness, ["m", name])
    assert EmulatedGraph.replayed > 10
    for one in found[name]:
        exact, bound = exact_logprobs(base, adapters[name], (*TEXT, *one.token_ids))
        for position, detail in enumerate(one.logprobs or (), len(TEXT) - 1):
            assert abs(detail.logprob - float(exact[position, detail.token_id])) < bound
