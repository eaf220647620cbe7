"""Multimodal checkpoints: their language model is read, and computes what the whole model computes for a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.core.reference import float64
from engine.models.decoder import Decoder
from engine.protocol.types import EngineError
from tests.closeness import assert_rounded
from tests.engine.conftest import small_tokenizer
from tests.engine.helpers import Harness
from tests.engine.models.test_models import engine_logits, random_tokens
from tests.long import mostly_long
from tests.rounding import MARGIN, compute_rounded
from tests.seeds import shift

_TEXT = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_COORDINATES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
_WHOLE_HEADS = {"rope_parameters": _COORDINATES["rope_parameters"] | {"partial_rotary_factor": 1.0}}
_WITHOUT_HEAD_DIM = {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Heads of 16 in classes that divide the hidden size by their number."""
_VISION_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}

WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "Gemma3ForConditionalGeneration": ({"sliding_window": 20, "query_pre_attn_scalar": 20}, _VISION, True),
    "Mistral3ForConditionalGeneration": ({"model_type": "mistral", "sliding_window": None}, _VISION, True),
    "Gemma4ForConditionalGeneration": (
        {"sliding_window": 20, "global_head_dim": 32, "hidden_size_per_layer_input": 16}
        | {"vocab_size_per_layer_input": 400, "use_bidirectional_attention": "vision", "pad_token_id": 0},
        _VISION | {"head_dim": 8, "global_head_dim": 8},
        True,
    ),
    "LlavaForConditionalGeneration": ({"model_type": "llama"}, _VISION, True),
    "Qwen3_5ForConditionalGeneration": (_DELTA, _VISION_QWEN, True),
    "Qwen3_5MoeForConditionalGeneration": (
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32, "intermediate_size": None},
        _VISION_QWEN,
        True,
    ),
    "Qwen2VLForConditionalGeneration": (
        _COORDINATES | _WITHOUT_HEAD_DIM,
        {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2},
        True,
    ),
    "Qwen2_5_VLForConditionalGeneration": (_COORDINATES | _WITHOUT_HEAD_DIM, _VISION_QWEN, True),
    "Qwen3VLForConditionalGeneration": (_COORDINATES, _VISION_QWEN | {"deepstack_visual_indexes": [0]}, True),
    "Qwen3VLMoeForConditionalGeneration": (
        _COORDINATES | _EXPERTS,
        _VISION_QWEN | {"deepstack_visual_indexes": [0]},
        True,
    ),
    "Glm4vForConditionalGeneration": (_WHOLE_HEADS | _WITHOUT_HEAD_DIM, _VISION_QWEN | {"head_dim": 16}, False),
    "Glm4vMoeForConditionalGeneration": (
        {**_WHOLE_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        _VISION_QWEN,
        False,
    ),
    "MllamaForConditionalGeneration": (
        {**_WITHOUT_HEAD_DIM, "cross_attention_layers": [1], "num_hidden_layers": 3},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1}
        | {"attention_heads": 2, "image_size": 28, "patch_size": 14, "max_num_tiles": 1, "vision_output_dim": 64}
        | {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]},
        False,
    ),
}
"""Fields of the language model and of the encoder, and whether the decoder is ours."""


def save_wrapper(architecture: str, folder: Path) -> None:
    """Save a random multimodal model."""
    torch.manual_seed(shift(7))
    text, vision, _ = WRAPPERS[architecture]
    small_tokenizer().save_pretrained(folder)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(text_config=_TEXT | text, vision_config=vision)
    model = model_class(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)


def compute_logits(architecture: str, folder: Path, tokens: tuple[int, ...]) -> tuple[torch.Tensor, float]:
    """Return the whole model's logits of a text in float64, and the bound of an error in float32."""
    options = {"dtype": torch.float64, "experts_implementation": "eager"}  # others lack float64
    with float64():
        model = getattr(transformers, architecture).from_pretrained(folder, **options).eval()
        exact = model(input_ids=torch.tensor([tokens])).logits[0]
    runs = compute_rounded(lambda: model(input_ids=torch.tensor([tokens])).logits[0])
    return exact, MARGIN * float((torch.stack(runs) - exact).abs().max())


@pytest.mark.parametrize("architecture", mostly_long(list(WRAPPERS), every=3))
def test_the_language_model_computes_what_the_whole_model_does(tmp_path: Path, architecture: str) -> None:
    save_wrapper(architecture, tmp_path)
    tokens = random_tokens(60, 1)
    harness = Harness(tmp_path)
    assert isinstance(harness.core.model.decoder, Decoder) == WRAPPERS[architecture][2]
    assert_rounded(engine_logits(harness, tokens), *compute_logits(architecture, tmp_path, tokens))


def test_a_config_without_a_part_for_the_language_model_is_read(tmp_path: Path) -> None:
    """Published Qwen2-VL and Qwen2.5-VL have its fields beside those of the encoder."""
    save_wrapper("Qwen2_5_VLForConditionalGeneration", tmp_path)
    expected = engine_logits(Harness(tmp_path), random_tokens(20, 2))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    flat = {name: value for name, value in text.items() if name not in ("model_type", "architectures")}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 10_000.0}
    del flat["rope_parameters"]
    path.write_text(json.dumps(flat | config))
    assert torch.equal(engine_logits(Harness(tmp_path), random_tokens(20, 2)), expected)


def test_the_thinker_of_an_omni_model_is_read(tmp_path: Path) -> None:
    save_wrapper("Qwen2_5_VLForConditionalGeneration", tmp_path)
    expected = engine_logits(Harness(tmp_path), random_tokens(20, 2))
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())["text_config"] | {"model_type": "qwen2_5_omni_text"}
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": text}
    omni = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": thinker}
    path.write_text(json.dumps(omni))
    file = tmp_path / "model.safetensors"
    tensors = {
        f"thinker.{name.replace('model.language_model.', 'model.')}": tensor for name, tensor in load_file(file).items()
    }
    tensors |= {name.replace("thinker.", "talker."): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(engine_logits(Harness(tmp_path), random_tokens(20, 2)), expected)


def test_encoders_of_a_model_that_is_loaded_whole_are_dropped(tmp_path: Path) -> None:
    save_wrapper("Glm4vForConditionalGeneration", tmp_path)
    encoder = sum(
        tensor.numel() for name, tensor in load_file(tmp_path / "model.safetensors").items() if "visual" in name
    )
    whole = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert Harness(tmp_path).core.model.decoder.parameters == whole - encoder < whole


@pytest.mark.parametrize("prefix", ["language_model.model.", "model."])
def test_names_of_older_checkpoints_are_read(tmp_path: Path, prefix: str) -> None:
    save_wrapper("LlavaForConditionalGeneration", tmp_path)
    expected = engine_logits(Harness(tmp_path), random_tokens(20, 2))
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("model.language_model.", prefix): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert torch.equal(engine_logits(Harness(tmp_path), random_tokens(20, 2)), expected)


def test_a_field_that_the_file_leaves_out_has_the_value_of_transformers(tmp_path: Path) -> None:
    """Published files hold only what differs from the defaults of the class."""
    save_wrapper("Gemma3ForConditionalGeneration", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    expected = engine_logits(Harness(tmp_path), random_tokens(40, 3))
    del config["text_config"]["rms_norm_eps"], config["text_config"]["hidden_activation"]
    path.write_text(json.dumps(config))
    assert torch.equal(engine_logits(Harness(tmp_path), random_tokens(40, 3)), expected)


def test_a_checkpoint_without_a_language_model_is_refused(tmp_path: Path) -> None:
    save_wrapper("LlavaForConditionalGeneration", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "language_model" not in name}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"has no tensors of a language model, which are named model.language_model."):
        Harness(tmp_path)


def test_a_language_model_that_transformers_lacks_is_refused_by_name(tmp_path: Path) -> None:
    save_wrapper("LlavaForConditionalGeneration", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": {"model_type": "albert"}}))
    with pytest.raises(EngineError, match="LlavaForConditionalGeneration is not supported"):
        Harness(tmp_path)
