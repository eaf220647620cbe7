"""Every key of a GGUF file's architecture is read as llama.cpp does, or refused by name; a mistake of ours shows.

The reference is transformers with a config and rotary angles from the header as the package ``gguf`` reads it
(``reasoner engine --check``). It was compared with the log-probabilities of llama.cpp's server for these very keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from engine.core.check import check_model
from engine.core.engine_core import EngineCore
from engine.core.gguf_reference.header import read_gguf_header
from engine.gguf import config
from engine.gguf.folder import open_gguf_folder
from engine.models.config import read_raw_config
from engine.models.families.read import decoder_config
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from tests.engine.conftest import save_random_model
from tests.engine.gguf.files import write_gguf
from tests.engine.gguf.test_models import CASES, WIDE
from tests.long import mostly_long

DIVISORS = [1.0 + 0.5 * index for index in range(8)]
Keys = dict[str, Any]


def add_keys(keys: Keys) -> Callable[[GGUFWriter], None]:
    """Return a change that adds keys of the architecture by their names, and tensors by theirs."""

    def change(writer: GGUFWriter) -> None:
        for name, value in keys.items():
            if name.endswith(".weight"):
                writer.add_tensor(name, np.array(value, np.float32))
                continue
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds.get(type(value), writer.add_array)(f"{writer.arch}.{name}", value)

    return change


def write(case: str, tmp_path: Path, keys: Keys) -> Path:
    architecture, class_name, options = CASES[case]
    save_random_model(class_name, {"initializer_range": 0.15} | WIDE | options, tmp_path / "checkpoint")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", architecture, change=add_keys(keys))
    return tmp_path / "model.gguf"


YARN: Keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
LONG: Keys = {
    "rope_factors_long.weight": DIVISORS,
    "rope_factors_short.weight": DIVISORS[::-1],
    "rope.scaling.original_context_length": 64,
}
READ: dict[str, tuple[str, Keys]] = {
    "the old linear scale": ("llama", {"rope.scale_linear": 4.0}),
    "the old linear scale of others": ("qwen3", {"rope.scale_linear": 4.0}),
    "a factor without a type": ("qwen2", {"rope.scaling.factor": 4.0}),
    "a linear factor": ("llama", {"rope.scaling.factor": 4.0, "rope.scaling.type": "linear"}),
    "both linear scales": ("llama", {"rope.scaling.factor": 2.0, "rope.scale_linear": 5.0}),
    "a factor of type none": ("llama", {"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}),
    "no factor": ("llama", {"rope.scaling.factor": 0.0}),
    "a magnitude": ("qwen3", {"rope.scaling.attn_factor": 1.3}),
    "a magnitude and a factor": ("llama", {"rope.scaling.attn_factor": 1.3, "rope.scale_linear": 2.0}),
    "yarn": ("llama", YARN),
    "yarn, its bounds": ("qwen2", YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}),
    "yarn, its extrapolation": ("qwen2", YARN | {"rope.scaling.yarn_ext_factor": 1.0}),
    "yarn, its magnitude": ("qwen2", YARN | {"rope.scaling.yarn_attn_factor": 1.1}),
    "yarn and a magnitude": ("qwen3", YARN | {"rope.scaling.attn_factor": 1.2}),
    "divisors and a factor": ("llama", {"rope_freqs.weight": DIVISORS, "rope.scaling.factor": 3.0}),
    "long divisors": ("llama", LONG | {"rope.scaling.type": "longrope"}),
    "short divisors": ("phi3", LONG | {"rope.scaling.original_context_length": 4096}),
    "long divisors of Phi-3": ("phi3", LONG | {"rope.scaling.attn_factor": 1.2}),
    "a part of the dimensions": ("phi3", {"rope.dimension_count": 8}),
    "Gemma 3, linear": ("gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "Gemma 3, the base of windows": ("gemma3", {"rope.freq_base_swa": 500.0}),
    "Gemma 3, Ollama's names": ("gemma3", {"rope.local.freq_base": 500.0, "rope.global.freq_base": 7.0}),
    "Gemma 3, its windows": (
        "gemma3",
        {"attention.sliding_window_pattern": [True, False, True, True, False] + [True] * 2},
    ),
    "Gemma 2, its windows": ("gemma2", {"attention.sliding_window_pattern": 3}),
    "experts that are not normalised": ("qwen3moe", {"expert_weights_norm": False}),
}


@pytest.mark.parametrize("case", mostly_long(READ, every=3))
def test_a_key_is_computed_as_the_header_says(case: str, tmp_path: Path) -> None:
    kind, keys = READ[case]
    folder = open_gguf_folder(write(kind, tmp_path, keys))
    result = check_model(folder, lambda done, total, next_part: None)
    assert result.is_close, result


@pytest.mark.parametrize("case", ["the old linear scale", "yarn", "long divisors", "Gemma 3, the base of windows"])
def test_a_key_that_is_not_read_shows_as_a_difference(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of the check would compute the same, if both read the same translation."""
    monkeypatch.setattr(config, "rope_fields", lambda metadata, *sizes: {"rope_theta": metadata.get("rope.freq_base")})
    monkeypatch.setattr("engine.gguf.metadata.Metadata.refuse_rest", lambda metadata: None)
    kind, keys = READ[case]
    assert not check_model(open_gguf_folder(write(kind, tmp_path, keys)), lambda done, total, next_part: None).is_close


@pytest.mark.parametrize(
    "name", ["attention.layer_norm_rms_epsilon", "attention.sliding_window", "attn_logit_softcapping"]
)
def test_other_mistakes_of_the_translation_show_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = write("gemma2", tmp_path, {}), config.config_fields
    fields = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}.get(name, name.removeprefix("attention."))
    monkeypatch.setattr(
        "engine.gguf.folder.config_fields", lambda model: (found := read(model)) | {fields: found[fields] * 1000}
    )
    assert not check_model(open_gguf_folder(path), lambda done, total, next_part: None).is_close


REFUSED: dict[str, tuple[str, Keys, str]] = {
    "an unknown scaling": ("llama", {"rope.scaling.type": "ntk"}, "rope.scaling.type is 'ntk'"),
    "a negative factor": ("llama", {"rope.scaling.factor": -2.0}, "rope.scaling.factor is -2"),
    "a factor that is no number": ("llama", {"rope.scaling.factor": float("nan")}, "rope.scaling.factor is nan"),
    "yarn's extrapolation": ("qwen2", YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
    "yarn's logarithm": ("llama", YARN | {"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
    "yarn of Phi-3": ("phi3", YARN, "rope.scaling.type is 'yarn'"),
    "yarn of Gemma 3": ("gemma3", YARN, "rope.scaling.type is 'yarn'"),
    "HunYuan's scaling": ("llama", {"rope.scaling.alpha": 1000.0}, "rope.scaling.alpha is 1000"),
    "a magnitude of Gemma 3": ("gemma3", {"rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor is 1.2"),
    "a part of the dimensions": ("llama", {"rope.dimension_count": 8}, "rope.dimension_count is 8"),
    "sections": ("qwen2", {"rope.dimension_sections": [8, 4, 4, 0]}, "rope.dimension_sections is"),
    "the base of windows": ("qwen3", {"rope.freq_base_swa": 500.0}, "rope.freq_base_swa is 500"),
    "divisors of others": ("qwen3", {"rope_freqs.weight": DIVISORS}, "'rope_freqs.weight', which qwen3 does not use"),
    "divisors of a type": ("llama", LONG, "which llama does not use with rope.scaling.type 'linear'"),
    "too few divisors": ("llama", {"rope_freqs.weight": DIVISORS[:4]}, "'rope_freqs.weight' must be 8 positive"),
    "a missing tensor": ("phi3", {"rope_factors_long.weight": DIVISORS}, "but lacks 'rope_factors_short.weight'"),
    "another scale": ("llama", {"attention.scale": 0.5}, "attention.scale is 0.5"),
    "another value length": ("llama", {"attention.value_length": 8}, "attention.value_length is 8"),
    "another logit scale": ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5"),
    "another embedding scale": ("qwen2", {"embedding_scale": 12.0}, "embedding_scale is 12"),
    "a residual scale": ("llama", {"residual_scale": 0.2}, "residual_scale is 0.2"),
    "a soft cap": ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
    "a window": ("llama", {"attention.sliding_window": 20}, "attention.sliding_window is 20"),
    "clamped projections": ("llama", {"attention.clamp_kqv": 8.0}, "attention.clamp_kqv is 8"),
    "ALiBi": ("llama", {"attention.max_alibi_bias": 8.0}, "attention.max_alibi_bias is 8"),
    "attention that is not causal": ("qwen2", {"attention.causal": False}, "attention.causal is False"),
    "experts of others": ("qwen3", {"expert_count": 4}, "expert_count is 4"),
    "shared experts": ("qwen3moe", {"expert_shared_count": 1}, "expert_shared_count is 1"),
    "groups of experts": ("qwen3moe", {"expert_group_count": 3}, "expert_group_count is 3"),
    "another router": ("qwen3moe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    "scaled experts": ("mixtral", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
    "Mixtral, not normalised": ("mixtral", {"expert_weights_norm": False}, "expert_weights_norm is False"),
    "further tokens": ("qwen3", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
    "an activation": ("llama", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
    "a key that nobody knows": ("llama", {"attention.sinks": 4}, "attention.sinks is 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_key_that_is_not_computed_is_refused_by_name(case: str, tmp_path: Path) -> None:
    kind, keys, message = REFUSED[case]
    with pytest.raises(EngineError) as refusal:
        open_gguf_folder(write(kind, tmp_path, keys))
    assert message in str(refusal.value)
    assert str(tmp_path / "model.gguf") in str(refusal.value)


def test_keys_at_the_value_that_changes_nothing_are_accepted(tmp_path: Path) -> None:
    keys: Keys = {
        "vocab_size": 400,
        "rope.dimension_count": 16,
        "rope.scaling.finetuned": True,
        "attention.value_length": 16,
    }
    keys |= {"logit_scale": 1.0, "residual_scale": 0.0, "attention.scale": 0.25, "attention.causal": True}
    keys |= {"use_parallel_residual": False, "tensor_data_layout": "Meta AI original pth", "attention.clamp_kqv": 0.0}
    keys |= {
        "attention.sliding_window": 256,
        "pooling_type": 3,
        "expert_count": 0,
        "attention.layer_norm_epsilon": 1e-5,
    }
    keys |= {"vision.block_count": 27, "expert_group_count": 1, "rope.dimension_sections": [0, 0, 0, 0]}
    path = write("llama", tmp_path, keys)
    assert json.loads((open_gguf_folder(path) / "config.json").read_text())["hidden_size"] == 96


def test_the_reference_has_the_angles_of_transformers_for_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """YaRN's angles of the header, against those of the same model as a checkpoint."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
    options = WIDE | {"rope_parameters": scaling}
    save_random_model("LlamaForCausalLM", options, tmp_path / "checkpoint")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "llama", change=add_keys(YARN))
    frequencies, magnitude = read_gguf_header(tmp_path / "model.gguf")._compute_frequencies(256)
    expected = decoder_config(read_raw_config(tmp_path / "checkpoint")).ropes[0].tables(2)
    cosines = torch.cos(torch.tensor(frequencies)).repeat(2) * magnitude
    torch.testing.assert_close(expected[0][1].double(), cosines, rtol=1e-6, atol=0)


def test_a_file_with_these_keys_serves_requests(tmp_path: Path) -> None:
    folder = open_gguf_folder(write("llama", tmp_path, {"rope.scale_linear": 4.0}))
    core = EngineCore("model", folder, EngineOptions(kv_tokens=512, max_running=2, device="cpu"))
    assert core.model.info.context == 256
