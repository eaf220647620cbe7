"""Drafts of DFlash heads equal those of their published definition over the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.engine_core import EngineCore
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, EngineError
from engine.scheduler.draft import EMPTY_DRAFT
from engine.speculation.control.controller import FixedController
from engine.speculation.drafters import tree_draft
from engine.speculation.drafters.dflash.head import load_dflash
from engine.speculation.load import list_key_shapes
from tests.engine.conftest import Checkpoints, save_random_model
from tests.engine.gpu import emulate_gpu
from tests.engine.helpers import SMALL, Harness, generate
from tests.engine.speculation.dflash_heads import DFlashReference, Parts, dflash_parts
from tests.engine.speculation.heads import (
    Asked,
    Recorder,
    assert_same_drafts,
    bound_drafts,
    check_drafts,
    save_head,
)
from tests.engine.speculation.test_exact import PROMPTS, answers, completions, requests
from tests.engine.ties import assert_same_tokens
from tests.long import mostly_long_grid

SHAPES = {"chain": (4, 4), "tree": (3, 10)}
WINDOWS = ["sliding_attention", "full_attention"]
HEADS: dict[str, dict[str, Any]] = {
    "like the target": {"layers": (0, 2)},
    "windows": {"kinds": WINDOWS, "heads": (4, 1, 32), "layers": (1, 3, 6), "has_bias": True},
    "causal": {"kinds": WINDOWS, "causal": True, "input_embedding_scale": 2.0},
    "selector": {
        **{"has_selector": True, "heads": (3, 3, 16), "kinds": ["sliding_attention"] * 2, "causal": False},
        **{"output_multiplier": 0.7, "final_logit_softcapping": 9.0},
    },
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Qwen3 model with eight layers."""
    folder = tmp_path_factory.mktemp("deep")
    save_random_model("Qwen3ForCausalLM", {"num_hidden_layers": 8, "initializer_range": 0.3}, folder)
    return folder


@pytest.fixture(autouse=True)
def _everything_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow all draft tokens, since random weights give each a low probability."""
    monkeypatch.setattr(tree_draft, "FLOOR", 0.0)


def drafting(
    folder: Path, head: Path, shape: tuple[int, int], options: EngineOptions = SMALL
) -> tuple[Harness, Recorder]:
    harness = Harness(folder, options)
    recorder = Recorder(load_dflash(head, harness.core.model.decoder))
    harness.core.start_speculation(recorder, FixedController(*shape))
    return harness, recorder


def check(folder: Path, parts: Parts, made: Sequence[Asked], shape: tuple[int, int]) -> None:
    """Compare drafts of full depth; near a branch's end a block is shorter, unless another branch's is not."""
    full = [one for one in made if one.wish.depth == shape[0]]
    assert len(full) > 0.5 * len(made)
    check_drafts(*(DFlashReference(folder, parts, shape[0]) for _ in range(2)), full)


def drafted(recorder: Recorder) -> list[Asked]:
    return [one for one in recorder.asked if one.draft != EMPTY_DRAFT]


@pytest.mark.parametrize(("name", "shape"), mostly_long_grid(HEADS, SHAPES, every=3))
def test_drafts_equal_those_of_the_head_over_the_whole_text(deep: Path, tmp_path: Path, name: str, shape: str) -> None:
    """Several branches at once, which share pages and whose prompts are prefilled in chunks."""
    parts = dflash_parts(**HEADS[name])
    options = replace(SMALL, step_tokens=32, page_size=8)
    harness, recorder = drafting(deep, save_head(tmp_path, *parts), SHAPES[shape], options)
    asked = requests("plain")
    ours, plain = (
        [one.token_ids for one in completions(answers(each, asked))] for each in (harness, Harness(deep, SMALL))
    )
    assert_same_tokens(deep, asked, ours, plain)
    made = drafted(recorder)
    assert len(made) > 0.9 * len(recorder.asked) > 50
    check(deep, parts, made[::7], SHAPES[shape])


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_preempted_branches_over_a_quantized_cache_are_answered_exactly(
    deep: Path, tmp_path: Path, kv_dtype: str
) -> None:
    tight = EngineOptions(kv_tokens=160, page_size=8, max_running=6, step_tokens=24, kv_dtype=kv_dtype)
    asked = [replace(request, pin_key="a") for request in requests("plain", 40)]
    plain = answers(Harness(deep, replace(SMALL, kv_dtype=kv_dtype)), asked)
    harness, recorder = drafting(deep, save_head(tmp_path, *dflash_parts(**HEADS["windows"])), (3, 10), tight)
    ours = answers(harness, asked)
    tokens, expected = ([one.token_ids for one in completions(some)] for some in (ours, plain))
    assert_same_tokens(deep, asked, tokens, expected, kv_dtype)
    assert harness.core.stats.preemptions > 0
    assert len(drafted(recorder)) > 0.8 * len(recorder.asked)


def test_a_continued_branch_reuses_the_heads_cached_keys(deep: Path, tmp_path: Path) -> None:
    parts = dflash_parts(**HEADS["windows"])
    harness, recorder = drafting(deep, save_head(tmp_path, *parts), (3, 3), replace(SMALL, page_size=8))
    first = harness.complete(generate(PROMPTS[2], [Branch(5, 0, 21)], ignore_eos=True))[0]
    recorder.asked.clear()
    again = harness.complete(generate(PROMPTS[2], [Branch(6, 0, 12, first.token_ids[:12])], ignore_eos=True))[0]
    assert again.cached_tokens == len(PROMPTS[2]) + 11
    made = drafted(recorder)
    assert len(made) >= 5
    check(deep, parts, made, (3, 3))


@pytest.mark.parametrize("name", ["windows", "selector"])
def test_drafts_on_a_gpu_are_those_of_the_cpu(
    deep: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, made = dflash_parts(**HEADS[name]), []
    head = save_head(tmp_path, *parts)
    for is_gpu in (False, True):
        if is_gpu:
            emulate_gpu(monkeypatch)
        harness, recorder = drafting(deep, head, (4, 4))
        answers(harness, requests("greedy"))
        made.append([one for one in drafted(recorder) if one.wish.depth == 4])
    reference = DFlashReference(deep, parts, 4)
    assert len(made[0]) > 10
    assert_same_drafts(*made, bound_drafts(lambda one: reference.logits(one.tokens, ()), made[0]))


@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_the_option_drafts_for_models_with_states_and_with_latents(
    checkpoints: Checkpoints, tmp_path: Path, kind: str
) -> None:
    """Their keys have other sizes than the head's, or none, and so the head's have pages of their own."""
    folder, head = checkpoints(kind), save_head(tmp_path / "head", *dflash_parts())
    harness = Harness(folder, replace(SMALL, draft=f"dflash={head}"))
    shapes = list_key_shapes(f"dflash={head}", folder, harness.core.model.decoder.config)
    assert len(shapes) == 2
    assert [pool.layers[-2:] for pool in harness.core.cache.pools if pool.shape == shapes[0]]
    asked = [generate(prompt, [Branch(1, 1, 12)], ignore_eos=True) for prompt in PROMPTS]
    ours, plain = ([one.complete(each)[0].token_ids for each in asked] for one in (harness, Harness(folder, SMALL)))
    assert_same_tokens(folder, asked, ours, plain)
    stats = harness.core.speculation_stats
    assert stats is not None
    assert stats.drafted > 10


def test_the_checkpoint_may_bring_the_head(deep: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in deep.iterdir():
        (folder / path.name).symlink_to(path)
    save_head(folder / "drafter", *dflash_parts())
    speculator = EngineCore("m", folder, replace(SMALL, draft="auto")).runner.speculator
    assert speculator is not None
    assert speculator.drafter.kind == "dflash"


@pytest.mark.parametrize(
    ("changes", "own", "message"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            {},
            r"is not a DFlash head's: architectures are \['Qwen3ForCausalLM'\]",
        ),
        ({"hidden_size": 64}, {}, "hidden_size is 64, but the target model's is 48"),
        ({"vocab_size": 401}, {}, "vocab_size is 401, but the target model's is 400"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu' is not supported"),
        ({"num_key_value_heads": 4}, {}, "6 heads cannot share 4 key-value heads"),
        ({"layer_types": ["linear_attention"] * 2}, {}, "layer_types must be 2 of full_attention, sliding_attention"),
        ({"num_hidden_layers": "2"}, {}, "num_hidden_layers must be a whole number above 0, but is '2'"),
        ({"moe_layers": 3}, {}, "moe_layers is not supported"),
        ({}, {"fc_layernorm": True}, "fc_layernorm is not supported"),
        ({}, {"mask_token_id": 400}, "mask_token_id is 400, which the target's embeddings, of 400 tokens, lack"),
        ({}, {"block_size": 1}, "block_size is 1; a block has the last token and at least one to predict"),
        ({}, {"target_layer_ids": [2, 1]}, r"target_layer_ids are \[2, 1\]; they must ascend from 0 to 6"),
        ({}, {"target_layer_ids": [7]}, r"target_layer_ids are \[7\]; they must ascend from 0 to 6"),
        ({"architectures": ["DFlash2DraftModel"]}, {}, "lacks 'conv_kernel_size'"),
        (
            {"architectures": ["DFlash2DraftModel"]},
            {"conv_kernel_size": 2, "conv_group_size": 7, "selector_rank": 2, "selector_top_k": 2},
            "conv_group_size is 7, which does not divide the hidden_size of 48",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    deep: Path, tmp_path: Path, changes: dict[str, Any], own: dict[str, Any], message: str
) -> None:
    config, tensors = dflash_parts()
    config = config | changes | {"dflash_config": config["dflash_config"] | own}
    with pytest.raises(EngineError, match=message):
        EngineCore("m", deep, replace(SMALL, draft=f"dflash={save_head(tmp_path, config, tensors)}"))


def test_broken_weights_are_refused_by_name(deep: Path, tmp_path: Path) -> None:
    config, tensors = dflash_parts()
    model = Harness(deep).core.model.decoder
    without = {name: tensor for name, tensor in tensors.items() if name != "fc.weight"}
    with pytest.raises(EngineError, match=r"fc\.weight"):
        load_dflash(save_head(tmp_path / "missing", config, without), model)
    with pytest.raises(EngineError, match=r"embed_tokens\.weight"):
        load_dflash(save_head(tmp_path / "left", config, tensors | {"embed_tokens.weight": torch.ones(1)}), model)


def test_a_head_of_no_decoder_of_ours_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    head = save_head(tmp_path, *dflash_parts())
    with pytest.raises(EngineError, match="DFlash heads are not supported for Olmo2ForCausalLM"):
        EngineCore("m", checkpoints("olmo2"), replace(SMALL, draft=f"dflash={head}"))
