"""Architectures of transformers with small random weights: each computes transformers' logits, or is refused by name.

A prompt and what follows it token by token are compared with float64. Other tests have the architectures of
``conftest.MODELS``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.protocol.types import EngineError
from tests.engine.conftest import MODELS, SPARSE, save_random_model
from tests.engine.exact import assert_equal_logits
from tests.engine.helpers import Harness
from tests.engine.models.test_models import engine_logits, random_tokens
from tests.long import mostly_long

ROOT = Path(__file__).parents[3]
_WIDTH: dict[str, Any] = {"head_dim": None}
"""For architectures whose heads together are as wide as their hidden states."""
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_LATENT = {
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 6,
}
_SHARED_BLOCKS = {
    "head_dim": None,
    "num_key_value_heads": 6,
    "mamba_d_state": 8,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
}

EXACT: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": _MOE | {"first_k_dense_replace": 1},
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "AXK1ForCausalLM": _LATENT | _ROUTED | {"first_k_dense_replace": 1},
    "BioGptForCausalLM": {},
    "Cohere2ForCausalLM": {},
    "Cohere2MoeForCausalLM": _MOE,
    "CwmForCausalLM": {"bos_token_id": 1},
    "DeepseekV2ForCausalLM": _LATENT | _ROUTED | {"head_dim": 8, "first_k_dense_replace": 1},
    "Dots1ForCausalLM": _ROUTED | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "Ernie4_5ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "Exaone4ForCausalLM": {},
    "ExaoneMoeForCausalLM": _MOE,
    "FalconMambaForCausalLM": {"state_size": 8},
    "FlexOlmoForCausalLM": _MOE,
    "FlintForCausalLM": {},
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Glm4MoeForCausalLM": _ROUTED | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "Glm4MoeLiteForCausalLM": _LATENT | _ROUTED | {"first_k_dense_replace": 1},
    "GPTBigCodeForCausalLM": {"n_embd": 48, "n_layer": 2, "n_head": 6},
    "GraniteMoeForCausalLM": _MOE,
    "GraniteMoeSharedForCausalLM": _MOE,
    "GraniteSWAForCausalLM": {},
    "HeliumForCausalLM": {"head_dim": 8},
    "HunYuanDenseV1ForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2},
    "HYV3ForCausalLM": _MOE,
    "HyperCLOVAXForCausalLM": {},
    "Jais2ForCausalLM": {},
    "JetMoeForCausalLM": _MOE,
    "KimiLinearForCausalLM": _LATENT
    | _ROUTED
    | {"q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 4, "num_local_experts": 4, "n_shared_experts": 1}
    | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "LagunaForCausalLM": _MOE,
    "Lfm2MoeForCausalLM": _MOE | {"layer_types": ["conv", "full_attention"]},
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashForCausalLM": _LATENT | _ROUTED | {"head_dim": 8, "moe_topk": 2, "num_layers": 2},
    "MambaForCausalLM": {"state_size": 8},
    "MellumForCausalLM": _MOE,
    "MiniCPM3ForCausalLM": _LATENT,
    "MiniMaxM2ForCausalLM": _MOE,
    "MinistralForCausalLM": {},
    "NanoChatForCausalLM": {},
    "NemotronForCausalLM": {},
    "OlmoForCausalLM": {},
    "OlmoeForCausalLM": _WIDTH | _MOE,
    "OlmoHybridForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "PhiForCausalLM": {},
    "PhimoeForCausalLM": _MOE,
    "Qwen2MoeForCausalLM": _MOE | {"shared_expert_intermediate_size": 32},
    "SeedOssForCausalLM": {},
    "SolarOpenForCausalLM": _ROUTED,
    "VaultGemmaForCausalLM": {},
    "ZambaForCausalLM": _SHARED_BLOCKS | {"mamba_dt_rank": 4, "n_mamba_heads": 2},
    "Zamba2ForCausalLM": _SHARED_BLOCKS | {"n_mamba_heads": 6, "chunk_size": 16, "use_mem_rope": True},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "BloomForCausalLM": ({"n_layer": 2, "n_head": 6}, "ALiBi position biases"),
    "HYV4ForCausalLM": (_MOE, "sparse attention with an indexer"),
    "InklingForCausalLM": (_MOE, "position biases"),
    "MiniMaxForCausalLM": (_MOE, "computed in pieces over the paged cache, its logits differ"),
    "GPTJForCausalLM": ({"n_embd": 48, "n_layer": 2, "n_head": 6, "rotary_dim": 8}, "do not call attention"),
    "RecurrentGemmaForCausalLM": ({"attention_window_size": 20, "lru_width": 48}, "recurrent layers"),
}


@pytest.mark.parametrize("architecture", mostly_long(EXACT, every=17))
def test_an_architecture_computes_transformers_logits(tmp_path: Path, architecture: str) -> None:
    save_random_model(architecture, {"initializer_range": 0.3} | EXACT[architecture], tmp_path)
    tokens, harness = random_tokens(70, 1), Harness(tmp_path)
    prompt, decoded = engine_logits(harness, tokens[:41]), engine_logits(harness, tokens, start=41)
    assert_equal_logits(torch.cat((prompt, decoded)), tmp_path, tokens)


@pytest.mark.parametrize("architecture", mostly_long(REFUSED, every=3))
def test_an_architecture_is_refused_in_one_line(tmp_path: Path, architecture: str) -> None:
    options, reason = REFUSED[architecture]
    save_random_model(architecture, options, tmp_path)
    with pytest.raises(EngineError, match=reason) as refusal:
        Harness(tmp_path)
    assert "\n" not in str(refusal.value)


def test_the_committed_table_lists_each_architecture_once_computed_or_refused() -> None:
    """The table of errors, ``architecture_table``, was written after the last architecture was added."""
    table = (ROOT / "benchmarks" / "results" / "architectures" / "table.md").read_text(encoding="utf-8")
    computed, refused = (
        {line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")}
        for part in table.split("| refused |")
    )
    models = {one for one, _ in (MODELS | SPARSE).values() if one.endswith(("CausalLM", "HeadModel"))}
    assert computed - {"architecture"} == models | set(EXACT)
    assert len(computed) >= 60
    assert refused - {"reason"} == set(REFUSED)
