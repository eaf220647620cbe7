"""The layers that an EAGLE-3 head's config selects, and heads that are refused by name and number."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.models.config import ModelConfig
from engine.protocol.types import EngineError
from engine.speculation.drafters.eagle3.config import is_eagle3, read_eagle3_config
from engine.speculation.drafters.eagle3.head import load_eagle3
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness
from tests.engine.speculation.eagle3_heads import DRAFT_IDS, Parts, eagle3_parts
from tests.engine.speculation.heads import HEAD_DIM, KV_HEADS, VOCAB, save_head


def target(num_layers: int) -> ModelConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_context": 256}
    return cast(ModelConfig, SimpleNamespace(num_layers=num_layers, **sizes))


QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_layers": 36,
    "kv_heads": 8,
    "head_dim": 128,
    "max_context": 40960,
}
LLAMA_8B = QWEN3_8B | {"vocab_size": 128256, "num_layers": 32, "max_context": 131072}
_LLAMA_LAYER: dict[str, Any] = {
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "speculators": (
        {
            "architectures": ["Eagle3Speculator"],
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "base_model_ep_plan": None,
            "draft_vocab_size": 32000,
            "dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": None,
            "embed_requires_grad": False,
            "fc_norm": False,
            "has_no_defaults_at_init": False,
            "norm_before_fc": False,
            "norm_before_residual": True,
            "norm_output": False,
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
            "speculators_model_type": "eagle3",
            "speculators_version": "0.4.0.1",
            "target_hidden_size": None,
            "transformer_layer_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 4096,
                "initializer_range": 0.02,
                "intermediate_size": 12288,
                "layer_types": ["full_attention"],
                "max_position_embeddings": 40960,
                "max_window_layers": 36,
                "mlp_bias": False,
                "model_type": "llama",
                "num_attention_heads": 32,
                "num_hidden_layers": 1,
                "num_key_value_heads": 8,
                "pretraining_tp": 1,
                "rms_norm_eps": 1e-06,
                "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
                "sliding_window": None,
                "use_cache": True,
                "vocab_size": 151936,
            },
            "transformers_version": "5.0.0",
        },
        QWEN3_8B,
        (2, 18, 33),
    ),
    "safeai": (
        {"architectures": ["LlamaForCausalLM"], **_LLAMA_LAYER, "draft_vocab_size": 32000},
        LLAMA_8B,
        (2, 16, 29),
    ),
    "modelopt": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            **_LLAMA_LAYER,
            "draft_vocab_size": 32000,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 128,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": None,
            },
        },
        LLAMA_8B,
        (2, 16, 29),
    ),
}
"""Configs with the fields of published heads, their targets, and the layers that they were trained on."""


@pytest.mark.parametrize("form", list(PUBLISHED))
def test_configs_with_the_fields_of_published_heads_are_read(tmp_path: Path, form: str) -> None:
    fields, sizes, layers = PUBLISHED[form]
    assert is_eagle3(fields)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_eagle3_config(tmp_path, cast(ModelConfig, SimpleNamespace(**sizes)))
    assert config.target_layers == layers
    assert (config.draft_vocab_size, config.attention.heads, config.attention.kv_heads) == (32000, 32, 8)
    assert config.norm_before_residual == (form == "speculators")
    theta = {"speculators": 1_000_000.0, "safeai": 10_000.0, "modelopt": 500_000.0}
    assert config.rope.parameters["rope_theta"] == theta[form]
    assert config.rope.kind == ("llama3" if form == "modelopt" else "default")


@pytest.mark.parametrize(("num_layers", "layers"), [(7, (2, 3, 4)), (32, (2, 16, 29)), (36, (2, 18, 33))])
@pytest.mark.parametrize("form", ["safeai", "speculators", "modelopt"])
def test_without_layers_the_head_fuses_the_inputs_of_three(
    tmp_path: Path, form: str, num_layers: int, layers: tuple[int, ...]
) -> None:
    head = save_head(tmp_path, *eagle3_parts(form, layers=None, num_states=3))
    assert read_eagle3_config(head, target(num_layers)).target_layers == layers


def test_layers_count_those_before_at_the_top_and_name_the_last_one_inside_eagle_config(tmp_path: Path) -> None:
    """A head of 94 layers is published in both notations: 2, 47, 91 are the default three."""
    config, tensors = eagle3_parts("modelopt", layers=None, num_states=3)
    nested = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}
    assert read_eagle3_config(save_head(tmp_path, nested, tensors), target(94)).target_layers == (2, 47, 91)
    top = config | {"eagle_aux_hidden_state_layer_ids": [2, 47, 91]}
    assert read_eagle3_config(save_head(tmp_path, top, tensors), target(94)).target_layers == (2, 47, 91)


def test_heads_are_recognized_by_their_config() -> None:
    for form in ("safeai", "speculators", "modelopt"):
        assert is_eagle3(eagle3_parts(form)[0])
    assert not is_eagle3({"architectures": ["LlamaForCausalLM"]})
    assert not is_eagle3({"kind": "eagle"})


def test_a_head_without_a_vocabulary_of_its_own_ignores_its_mappings(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As both formats' own code does."""
    config, tensors = eagle3_parts("modelopt")
    mapped = {**tensors, "d2t": torch.ones(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    model = Harness(checkpoints("llama")).core.model.decoder
    features, logits = torch.randn(3, 48), []
    for index, some in enumerate((tensors, mapped)):
        drafter = load_eagle3(save_head(tmp_path / str(index), config, some), model)
        logits.append(drafter._layer.compute_logits(features))
    assert torch.equal(*logits)


def test_tokens_outside_the_heads_vocabulary_have_no_probability(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = Harness(checkpoints("llama")).core.model.decoder
    drafter = load_eagle3(save_head(tmp_path, *eagle3_parts()), model)
    logits = drafter._layer.compute_logits(torch.randn(3, 48))
    assert logits.shape == (3, VOCAB)
    assert (logits.isfinite().nonzero()[:, 1].view(3, -1) == DRAFT_IDS).all()


Change = dict[str, Any]
TOP: list[tuple[Change, str]] = [
    ({"draft_vocab_size": 401}, "draft_vocab_size is 401, but vocab_size is 400"),
    ({"draft_vocab_size": 300}, r"'lm_head.weight' has shape \(350, 48\), its config.json says \(300, 48\)"),
    ({"target_hidden_size": 64}, "target_hidden_size is 64, but the target model's is 48"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "states after 1, 2 layers; they must ascend from 1 to 1"),
    ({"eagle_aux_hidden_state_layer_ids": [0]}, "states after 0 layers; they must ascend from 1 to 1"),
    ({"eagle_aux_hidden_state_layer_ids": None}, "without .* selects .* after 2, 1, -1 layers; .* target has 2 layers"),
    ({"eagle_aux_hidden_state_layer_ids": "1"}, "wrong type"),
    ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
    ({"fc_norm": True}, "lacks the tensor 'fc_norm.0.weight'"),
    ({"parallel_drafting": True}, "parallel_drafting is not supported"),
]
"""Changes of fields of the head, and the error."""
LAYER: list[tuple[Change, str]] = [
    ({"hidden_size": 64}, "hidden_size is 64, but the target model's is 48"),
    ({"vocab_size": 401}, "vocab_size is 401, but the target model's is 400"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3, but the target model's is 2"),
    ({"head_dim": 32}, "head_dim is 32, but the target model's is 16"),
    ({"num_attention_heads": 5}, "5 heads cannot share 2 key-value heads"),
    ({"num_attention_heads": "6"}, "num_attention_heads must be a whole number above 0, but is '6'"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2; only heads of one layer are supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
    ({"layer_types": ["sliding_attention"]}, "a sliding window is not supported"),
    ({"intermediate_size": 65}, r"has shape \(64, 48\), its config.json says \(65, 48\)"),
    ({"attention_bias": True}, "lacks the tensor '.*self_attn.q_proj.bias'"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope scaling 'spiral' is not supported"),
    ({"attention_sinks": 4}, "attention_sinks is not supported"),
]
"""Changes of fields of its layer."""


def refuse(parts: Parts, message: str, checkpoints: Checkpoints, folder: Path) -> None:
    model = Harness(checkpoints("llama")).core.model.decoder
    with pytest.raises(EngineError, match=message) as caught:
        load_eagle3(save_head(folder, *parts), model)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("form", ["safeai", "speculators"])
def test_fields_that_do_not_fit_are_refused(checkpoints: Checkpoints, tmp_path: Path, form: str) -> None:
    config, tensors = eagle3_parts(form)
    for index, (change, message) in enumerate(TOP):
        refuse((config | change, tensors), message, checkpoints, tmp_path / f"head {index}")
    for index, (change, message) in enumerate(LAYER):
        changed = config | change
        if form == "speculators":
            changed = config | {"transformer_layer_config": config["transformer_layer_config"] | change}
        refuse((changed, tensors), message, checkpoints, tmp_path / f"layer {index}")


FORMATS: list[tuple[str, Change, str]] = [
    ("speculators", {"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash', not 'eagle3'"),
    ("speculators", {"transformer_layer_config": {"model_type": "gpt2"}}, "'gpt2' is not supported; supported: llama"),
    ("speculators", {"transformer_layer_config": None}, "None is not supported; supported: llama, qwen3"),
    ("safeai", {"architectures": ["MedusaModel"]}, r"not an EAGLE-3 head's: architectures are \['MedusaModel'\]"),
    ("safeai", {"hidden_size": None}, "hidden_size must be a whole number above 0, but is None"),
    ("modelopt", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state .* False; only True"),
    ("modelopt", {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step of eagle_config is 4; only 1 is"),
    ("modelopt", {"eagle_config": {"use_spirals": True}}, "use_spirals of eagle_config is True and not supported"),
]


@pytest.mark.parametrize(("form", "change", "message"), FORMATS)
def test_other_formats_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, form: str, change: Change, message: str
) -> None:
    config, tensors = eagle3_parts(form)
    refuse((config | change, tensors), message, checkpoints, tmp_path)


def test_a_missing_field_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    config, tensors = eagle3_parts("safeai")
    del config["intermediate_size"]
    refuse((config, tensors), "lacks 'intermediate_size'", checkpoints, tmp_path)


OFFSETS = DRAFT_IDS - torch.arange(len(DRAFT_IDS))
TENSORS: list[tuple[dict[str, Tensor | None], str]] = [
    ({"fc.weight": None}, "lacks the tensor 'fc.weight'"),
    ({"fc.weight": torch.zeros(48, 144)}, r"'fc.weight' has shape \(48, 144\), its config.json says \(48, 48\)"),
    ({"mask_hidden": torch.zeros(48), "layers.1.fc": torch.zeros(1)}, "does not use: layers.1.fc, mask_hidden"),
    ({"d2t": None}, "lacks the tensor 'd2t'"),
    ({"d2t": OFFSETS.float()}, "'d2t' is torch.float32; it must be of whole numbers"),
    (
        {"d2t": OFFSETS + 40},
        "must map 350 tokens to different ones of the target's 400, but maps them to 350 from 40 to 439",
    ),
    ({"d2t": -torch.arange(350)}, "but maps them to 1 from 0 to 0"),
    ({"d2t": OFFSETS[:9]}, r"'d2t' has shape \(9,\), its config.json says \(350,\)"),
    ({"t2d": torch.ones(400, dtype=torch.bool)}, "'t2d' marks other tokens of the target than 'd2t' maps to"),
]


@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    config, tensors = eagle3_parts()
    changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
    refuse((config, changed), message, checkpoints, tmp_path)


def test_a_narrow_head_needs_embeddings_of_its_own(checkpoints: Checkpoints, tmp_path: Path) -> None:
    parts = eagle3_parts(hidden=32)
    refuse(parts, "lacks the tensor 'embed_tokens.weight'", checkpoints, tmp_path)


def test_weights_of_the_target_that_training_compared_with_are_ignored(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    config, tensors = eagle3_parts()
    tensors |= {"verifier_norm.weight": torch.ones(48), "verifier_lm_head.weight": torch.zeros(350, 48)}
    load_eagle3(save_head(tmp_path, config, tensors), Harness(checkpoints("llama")).core.model.decoder)


def test_a_pickle_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    config, tensors = eagle3_parts("safeai")
    save_head(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    model = Harness(checkpoints("llama")).core.model.decoder
    with pytest.raises(EngineError, match=r"pytorch_model.bin is a pickle, which could run code .* convert it"):
        load_eagle3(tmp_path, model)
