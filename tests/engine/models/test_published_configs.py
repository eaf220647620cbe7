"""Configs as the most used open models publish them load with small random weights and compute transformers' logits.

Sizes are reduced; every other field is kept. A config of ``configs/`` is written from the model's documentation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.models.by_transformers.model import TransformersModel
from engine.models.decoder import Decoder
from tests.engine.conftest import small_tokenizer
from tests.engine.exact import assert_equal_logits
from tests.engine.helpers import Harness
from tests.engine.models.test_models import engine_logits, random_tokens
from tests.long import mostly_long
from tests.seeds import shift

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))
BY_TRANSFORMERS = (
    "Gemma",
    "Glm",
    "Glm4",
    "KimiLinear",
    "Olmo",
    "Olmo2",
    "Phi",
    "StableLm",
    "Starcoder2",
)
"""Architectures without a decoder here."""
WARNED = {"qwen2.5-7b-instruct-1m": "dual_chunk_attention_config"}
"""Configs with a field that leaves them to transformers' code."""
_VOCAB, _HEADS, _HEAD_DIM = 400, 4, 16
_EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_EXPERTS |= {"n_routed_experts": 16}
_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_d_ssm": 128, "mamba_chunk_size": 16}
_MAMBA |= {"mamba_num_heads": 16, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
_MAMBA |= {"num_heads": 8, "state_size": 16, "shared_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}
_MAMBA |= {"attn_layer_indices": [3]}
_KDA = {"full_attn_layers": [4, 6], "kda_layers": [1, 2, 3, 5], "num_heads": 4, "head_dim": 16}


def shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config with small sizes: at most six layers, so that every kind of layer of a model is left."""
    layers = min(6, fields["num_hidden_layers"])
    groups = fields.get("num_attention_heads", 1) // fields.get("num_key_value_heads", 1)
    sizes = {
        "vocab_size": _VOCAB,
        "hidden_size": _HEADS * _HEAD_DIM,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": max(1, _HEADS // groups),
        "head_dim": _HEAD_DIM,
        "max_window_layers": layers * fields.get("max_window_layers", 0) // fields["num_hidden_layers"],
    }
    sizes |= _EXPERTS | _LATENT | _MAMBA
    small = {name: value if value is None else sizes.get(name, value) for name, value in fields.items()}
    if "linear_attn_config" in fields:
        small |= {"linear_attn_config": fields["linear_attn_config"] | _KDA, "num_experts_per_token": 2}
    if fields.get("num_local_experts") == 0:
        small |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    for name in ("layer_types", "no_rope_layers", "hybrid_override_pattern"):
        if name in small:
            small[name] = small[name][:layers]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = small.get(name)
        if ids is not None:
            small[name] = [token % _VOCAB for token in ids] if isinstance(ids, list) else ids % _VOCAB
    scaling = small.get("rope_scaling") or {}
    if "long_factor" in scaling:
        pairs = int(_HEAD_DIM * small.get("partial_rotary_factor", 1.0)) // 2
        small["rope_scaling"] = {
            name: value[:pairs] if isinstance(value, list) else value for name, value in scaling.items()
        }
    return small


def save_small_model(published: Path, folder: Path) -> None:
    """Write random weights, and the published config with small sizes just as it is."""
    text = json.dumps(shrink(json.loads(published.read_text())))
    folder.mkdir()
    (folder / "config.json").write_text(text)
    torch.manual_seed(shift(7))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.15)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)
    small_tokenizer().save_pretrained(folder)


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")  # a published field, of Kimi Linear
@pytest.mark.parametrize("published", mostly_long(CONFIGS, every=8), ids=[path.stem for path in CONFIGS])
def test_a_published_config_computes_transformers_logits(
    published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    save_small_model(published, folder)
    harness = Harness(folder)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("engine.")]
    architecture = harness.core.model.info.architecture
    if published.stem in WARNED:
        [warning] = warnings
        assert WARNED[published.stem] in warning
    else:
        assert warnings == []
        is_ours = architecture.removesuffix("ForCausalLM") not in BY_TRANSFORMERS
        assert isinstance(harness.core.model.decoder, Decoder if is_ours else TransformersModel)
    tokens = random_tokens(60, 1)
    prefill, decoded = engine_logits(harness, tokens[:41]), engine_logits(harness, tokens, start=41)
    assert_equal_logits(torch.cat((prefill, decoded)), folder, tokens)


def test_the_corpus_has_forty_models() -> None:
    assert len(CONFIGS) >= 40
