"""Architectures that transformers also has are computed by code of our own, or refused by the name of what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.config import read_raw_config
from engine.models.config_fields import UnsupportedField
from engine.models.decoder import Decoder
from engine.models.load import choose_decoder
from engine.protocol.types import EngineError
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL, Harness
from tests.engine.models.test_models import copy_checkpoint

_SHORT = {"rope_type": "default", "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5}
STRICT = replace(SMALL, strict_config=True)
KINDS = ["granite", "smollm3", "olmo3", "ministral3", "gpt_oss", "lfm2", "gemma4", "gemma4_shared", "gemma4_moe"]
KINDS += ["granite_hybrid", "nemotron_h", "nemotron_h_moe", "mamba2", "bamba", "falcon_h1_norm"]


def change(source: Path, target: Path, fields: dict[str, Any]) -> Path:
    folder = copy_checkpoint(source, target)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_is_computed_here_and_refuses_a_field_that_it_does_not_know(
    checkpoints: Checkpoints, tmp_path: Path, kind: str
) -> None:
    assert isinstance(Harness(checkpoints(kind), STRICT).core.model.decoder, Decoder)
    folder = change(checkpoints(kind), tmp_path / "model", {"some_new_feature": 3})
    with pytest.raises(UnsupportedField, match="some_new_feature"):
        Harness(folder, STRICT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_missing_or_left_over_is_refused_by_name(
    checkpoints: Checkpoints, tmp_path: Path, kind: str
) -> None:
    folder = copy_checkpoint(checkpoints(kind), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".layers.1." in name or ".conv." in name or ".mixer." in name]:
        rest = {other: tensor for other, tensor in weights.items() if other != name}
        save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(EngineError, match=name.replace(".", r"\.")):
            Harness(folder)
    save_file(weights | {"model.layers.1.new.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(EngineError, match=r"layers\.1\.new"):
        Harness(folder)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0.0; it must be more than 0"),
        ("granite", {"logits_scaling": -2.0}, "logits_scaling is -2.0"),
        ("granite", {"attention_multiplier": "wide"}, "wrong type"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be 2"),
        ("smollm3", {"use_sliding_window": False}, "there is no sliding_window"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "per layer type"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types must be 2"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0.0; it must be more than 0"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1; it must be 2 or more"),
        ("lfm2", {"layer_types": ["conv", "conv"]}, "with both, is supported"),
        ("gemma4_moe", {"top_k_experts": 6}, "num_experts_per_tok is 6"),
        ("gemma4_shared", {"per_layer_config": {"1": {"head_dim": 32}}}, "layer 3 has other heads than layer 1"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma4", {"num_kv_shared_layers": 4}, "an earlier layer of each kind must have its own keys"),
        ("gemma4", {"per_layer_config": {"9": {"head_dim": 32}}}, "per_layer_config has a layer 9 of 4"),
        ("gemma4", {"per_layer_config": {"3": {"window": 32}}}, "per_layer_config has window"),
        ("gemma4", {"per_layer_config": {"3": {"num_key_value_heads": 4}}}, "no decoder's shape"),
        ("gemma4", {"vocab_size_per_layer_input": 300}, "less than vocab_size"),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "of rope_type 'yarn'"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "betas": 3}}, "betas"),
        ("granite_hybrid", {"layer_types": ["mamba", "attention"]}, "layer_types must be 3"),
        ("granite_hybrid", {"layer_types": ["mamba", "attention", "conv"]}, "layer_types has conv"),
        ("granite_hybrid", {"mamba_d_head": 9}, "12 heads of 9 in 2 groups, .* are no shape of Mamba-2"),
        ("granite_hybrid", {"mamba_d_conv": 1}, "are no shape of Mamba-2"),
        ("granite_hybrid", {"mamba_n_groups": 5}, "12 heads of 8 in 5 groups"),
        ("granite_hybrid", {"time_step_limit": [2.0, 1.0]}, "time_step_limit is"),
        ("granite_hybrid", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ("granite_hybrid", {"normalization_function": "layernorm"}, "normalization_function is 'layernorm'"),
        ("nemotron_h", {"layers_block_type": ["mamba", "dense"]}, "layers_block_type has dense"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "hybrid_override_pattern is"),
        ("nemotron_h", {"layers_block_type": None}, "hybrid_override_pattern is ''"),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, "mlp_hidden_act 'gelu' is not supported"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias"),
        ("nemotron_h", {"sliding_window": 20}, "sliding_window"),
        ("mamba2", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers has 2 numbers"),
    ],
)
def test_a_value_without_meaning_is_refused_by_name(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, fields: dict[str, Any], reason: str
) -> None:
    folder = change(checkpoints(kind), tmp_path / "model", fields)
    with pytest.raises(EngineError, match=reason):
        choose_decoder(read_raw_config(folder), strict_config=True)


@pytest.mark.parametrize(
    ("kind", "fields", "is_recordable"),
    [
        ("granite", {}, True),
        ("smollm3", {}, True),
        ("ministral3", {}, True),
        ("ministral3", {"max_position_embeddings": 32, "rope_parameters": _SHORT}, True),
        ("olmo3", {}, True),
        ("qwen3_5", {}, True),
        ("lfm2", {}, True),
        ("deepseek_v3", {}, True),
        ("qwen3_moe", {}, True),
        ("gpt_oss", {}, True),
        ("gemma4", {}, True),
        ("gemma4_moe", {}, False),  # routers weight the experts by numbers of their own
    ],
)
def test_steps_are_recorded_where_all_of_them_is_kernels(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, fields: dict[str, Any], is_recordable: bool
) -> None:
    decoder = Harness(change(checkpoints(kind), tmp_path / "model", fields)).core.model.decoder
    assert isinstance(decoder, Decoder)
    assert decoder.is_recordable == is_recordable
