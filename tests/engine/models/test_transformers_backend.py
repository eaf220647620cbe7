"""Architectures without a decoder here: which of them the transformers backend runs on the paged cache, and which are
refused.

Their logits are compared in ``test_models``.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.by_transformers import attention, model
from engine.protocol.types import EngineError
from tests.engine.conftest import MODELS, save_random_model
from tests.engine.helpers import Harness


@pytest.mark.parametrize(
    ("architecture", "options", "windows"),
    [
        ("Olmo2ForCausalLM", {}, [None, None]),
        ("Starcoder2ForCausalLM", {"head_dim": None, "sliding_window": 20}, [20, 20]),
        (
            "Cohere2ForCausalLM",
            {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
            [20, None],
        ),
    ],
)
def test_windows_are_read_from_the_attention_masks_of_a_model(
    tmp_path: Path, architecture: str, options: dict[str, Any], windows: list[int | None]
) -> None:
    save_random_model(architecture, options, tmp_path)
    assert [layer.window for layer in Harness(tmp_path).core.model.config.attention] == windows


@pytest.mark.parametrize(
    ("architecture", "options", "named"),
    [
        ("RecurrentGemmaForCausalLM", {"attention_window_size": 20, "lru_width": 48}, "recurrent layers"),
        ("BloomForCausalLM", {"n_layer": 2, "n_head": 6}, "ALiBi"),
        ("T5ForConditionalGeneration", {"d_model": 48, "num_layers": 2, "num_heads": 6}, "is_encoder_decoder"),
        ("BertLMHeadModel", {}, "a mask that is neither causal"),
        ("GPTJForCausalLM", {"n_embd": 48, "n_layer": 2, "n_head": 6, "rotary_dim": 8}, "do not call attention"),
        ("LlamaForQuestionAnswering", {}, "would load LlamaForCausalLM"),
    ],
)
def test_features_that_paged_attention_lacks_are_refused_by_name(
    tmp_path: Path, architecture: str, options: dict[str, Any], named: str
) -> None:
    save_random_model(architecture, options, tmp_path)
    with pytest.raises(EngineError, match=rf"architecture {architecture} is not supported: .*{named}"):
        Harness(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "options", "module", "name", "value"),
    [
        ("GraniteSWAForCausalLM", {}, attention, "_SINKS", "no"),
        ("JambaForCausalLM", MODELS["jamba"][1], model, "wrap_mixers", lambda _: []),
    ],
)
def test_the_trial_run_detects_unlisted_features(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    options: dict[str, Any],
    module: ModuleType,
    name: str,
    value: Any,
) -> None:
    """Attention sinks, and layers with states beside attention, without the code that knows them."""
    save_random_model(architecture, options, tmp_path)
    monkeypatch.setattr(module, name, value)
    with pytest.raises(EngineError, match="computed in pieces over the paged cache, its logits differ"):
        Harness(tmp_path)


def test_missing_and_unused_tensors_are_refused_by_name(tmp_path: Path) -> None:
    save_random_model("Olmo2ForCausalLM", {}, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"model.layers.0.extra": torch.ones(3)}, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"unexpected tensors: model.layers.0.extra"):
        Harness(tmp_path)
    del weights["model.layers.1.self_attn.q_norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"missing tensors: model.layers.1.self_attn.q_norm.weight"):
        Harness(tmp_path)
    path.write_bytes(b"no tensors")
    with pytest.raises(EngineError, match="Olmo2ForCausalLM is not supported"):
        Harness(tmp_path)
