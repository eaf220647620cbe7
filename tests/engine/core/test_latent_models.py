"""Models with latent attention on the engine: forks, drafts, few bits and bad configs."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.layer import HeadShape
from engine.cache.key_pool import kv_bytes_per_token
from engine.models.config import read_raw_config
from engine.models.families.read import decoder_config
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineError, ScoreItem
from engine.quantization.options import create_options
from engine.quantization.quantize import quantize
from engine.speculation.control.controller import FixedController
from kernels.common.int4 import INT4
from tests.engine.conftest import SPARSE, Checkpoints
from tests.engine.exact import float32_loss
from tests.engine.helpers import SMALL, Harness, generate, score
from tests.engine.models.test_models import random_tokens
from tests.engine.speculation.stub_drafters import Oracle
from tests.long import mostly_long

KINDS = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", *SPARSE]
"""The first one's latents have a size that no kernel is compiled for, the last ones attend to some tokens only."""
PROMPT = random_tokens(45, 1)
BRANCHES = [Branch(5, key, 24) for key in range(6)]
GIB = 1 << 30


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=2))
@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        EngineOptions(kv_tokens=160, max_running=8, step_tokens=24),
        replace(SMALL, draft="ngram"),
        replace(SMALL, kv_dtype="int8"),
    ],
    ids=["forked", "preempted", "drafts", "int8 latents"],
)
def test_branches_have_the_tokens_of_one_that_is_computed_alone(
    checkpoints: Checkpoints, kind: str, options: EngineOptions
) -> None:
    options = replace(options, deterministic=kind in SPARSE)  # or near ties of an indexer would be decided by rounding
    prompt = (*PROMPT[:20], *PROMPT[:20], *PROMPT[:5])  # a repeated text, of which the n-gram drafter knows the rest
    found = Harness(checkpoints(kind), options).complete(generate(prompt, BRANCHES, temperature=0.8, ignore_eos=True))
    for completion, branch in zip(found, BRANCHES, strict=True):
        asked = generate(prompt, [branch], temperature=0.8, ignore_eos=True)
        [alone] = Harness(
            checkpoints(kind), replace(SMALL, kv_dtype=options.kv_dtype, deterministic=options.deterministic)
        ).complete(asked)
        assert completion.token_ids == alone.token_ids


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=2))
@pytest.mark.parametrize("shape", [(4, 4), (4, 9)], ids=["chain", "tree"])
def test_accepted_drafts_change_no_token(checkpoints: Checkpoints, kind: str, shape: tuple[int, int]) -> None:
    asked = generate(PROMPT, [Branch(1, key, 40) for key in range(3)], temperature=0.8, ignore_eos=True)
    plain = Harness(checkpoints(kind)).complete(asked)
    known = {
        (1, key, len(PROMPT) + place): token
        for key, one in enumerate(plain)
        for place, token in enumerate(one.token_ids)
    }
    harness = Harness(checkpoints(kind))
    harness.core.start_speculation(Oracle(known, 360, right=0.8), FixedController(*shape))
    found = harness.complete(asked)
    assert sum(one.accepted_tokens for one in found) > 20
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"])
def test_a_deterministic_model_has_the_same_bits_with_and_without_a_cache(checkpoints: Checkpoints, kind: str) -> None:
    options = replace(SMALL, deterministic=True)
    harness = Harness(checkpoints(kind), options)
    [parent] = harness.complete(generate(PROMPT, [Branch(1, 0, 13)], temperature=0.8, ignore_eos=True))
    asked = generate((*PROMPT, *parent.token_ids), BRANCHES, temperature=0.8, ignore_eos=True)
    for completion, branch in zip(harness.complete(asked), BRANCHES, strict=True):
        [alone] = Harness(checkpoints(kind), options).complete(replace(asked, branches=(branch,)))
        assert (completion.cached_tokens, alone.cached_tokens) == (len(asked.prompt) - 1, 0)
        assert (completion.token_ids, completion.logprob) == (alone.token_ids, alone.logprob)


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=2))
def test_a_verifier_reads_a_solution_on_the_cached_prefix(checkpoints: Checkpoints, kind: str) -> None:
    folder = checkpoints(kind)
    harness = Harness(folder)
    harness.complete(generate(PROMPT, [Branch(1, 0, 1)], temperature=0.0, ignore_eos=True))
    item = ScoreItem((PROMPT, (7, 8, 9)), (1,))
    [result], [alone] = (each.score(score(item, token_ids=range(20))) for each in (harness, Harness(folder)))
    assert (result.cached_tokens, alone.cached_tokens) == (len(PROMPT), 0)
    assert result.values is not None
    assert alone.values is not None
    assert result.values[0] == pytest.approx(alone.values[0], abs=2 * float32_loss(folder).logit)


@pytest.mark.parametrize(
    ("dtype", "latent", "grouped"),
    [(torch.float32, 7639, 2148), (torch.bfloat16, 15279, 4297), (torch.int8, 30348, 8334), (INT4, 54328, 15279)],
)
def test_a_gib_holds_more_tokens_of_latents_than_of_keys_and_values(
    dtype: torch.dtype, latent: int, grouped: int
) -> None:
    """61 layers with the latents of DeepSeek-V3, and with grouped queries on eight heads of 128 dimensions."""
    shapes = HeadShape(128, 1, 576, has_values=False), HeadShape(128, 8, 128)
    assert [GIB // (61 * kv_bytes_per_token(shape, dtype)) for shape in shapes] == [latent, grouped]


def test_layers_that_predict_several_tokens_are_skipped(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints("deepseek_v3"), tmp_path / "model")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.layers.2.eh_proj.weight": torch.ones(3, 3)}, path, metadata={"format": "pt"})
    assert len(_complete(folder)) == 1


def _complete(folder: Path) -> list[Completion]:
    return Harness(folder).complete(generate(PROMPT, [Branch(1, 0, 3)]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 0}, "no latent attention's shape"),
        ({"qk_rope_head_dim": 7}, "no latent attention's shape"),
        ({"num_key_value_heads": 2}, "no latent attention's shape"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"topk_group": 5}, "8 experts in 4 groups, of which a token has 5"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_fit_together_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(checkpoints("deepseek_v3"), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(EngineError, match=message):
        Harness(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_head_dim": 4}, "no indexer's shape"),
        ({"index_topk": 0}, "no indexer's shape"),
        ({"q_lora_rank": None}, "no indexer's shape"),
        ({"indexer_types": ["shared", "full", "full"]}, "'full' first, but is"),
        ({"indexer_types": None, "index_topk_pattern": "FXF"}, "but is ['full', 'X', 'full']"),
        ({"layer_types": ["full_attention"] * 3}, "only 'indexed_attention' is supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_indexer_that_does_not_fit_is_refused(
    checkpoints: Checkpoints, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(checkpoints("glm_moe_dsa"), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(EngineError, match=re.escape(message)):
        Harness(folder)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"index_topk_pattern": "FSS"}, {0}),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, {0, 2}),
        ({}, {0, 1, 2}),
    ],
    ids=["pattern", "distance", "neither"],
)
def test_layers_with_an_indexer_follow_from_a_pattern_or_a_distance(
    checkpoints: Checkpoints, fields: dict[str, Any], layers: set[int]
) -> None:
    raw = read_raw_config(checkpoints("glm_moe_dsa"))
    config = decoder_config(replace(raw, fields=raw.fields | {"indexer_types": None} | fields))
    assert config.latent is not None
    assert config.latent.indexer is not None
    assert config.latent.indexer.layers == layers


def test_int4_latents_need_a_size_of_whole_groups(checkpoints: Checkpoints) -> None:
    with pytest.raises(EngineError, match="multiple of 32; those of this model have 24"):
        Harness(checkpoints("deepseek_v2"), replace(SMALL, kv_dtype="int4"))
    assert (
        len(Harness(checkpoints("deepseek_v3"), replace(SMALL, kv_dtype="int4")).complete(generate(PROMPT, BRANCHES)))
        == 6
    )


def test_quantization_is_refused_by_name(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="latents in place of keys"):
        quantize(checkpoints("deepseek_v3"), tmp_path / "out", create_options("rtn", 8, None, None), lambda *_: None)
