"""Configs as published, including old forms and unused fields, are read correctly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.config import RawConfig, read_raw_config
from engine.models.families.config import DecoderConfig
from engine.models.families.read import decoder_config, is_defined
from engine.models.load import choose_decoder
from engine.models.routing import RoutingConfig

_COMMON = {"attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}


def read(architecture: str, fields: dict[str, Any]) -> DecoderConfig:
    assert is_defined(architecture)
    return decoder_config(RawConfig(Path("model"), _COMMON | {"architectures": [architecture]} | fields, {}))


def shape(hidden: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "transformers_version": "4.44.0",
    } | more


LLAMA_3_1 = shape(4096, 32, 32, 8, max_position_embeddings=131072, rope_theta=500000.0, mlp_bias=False) | {
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN_2_5 = shape(3584, 28, 28, 4, max_position_embeddings=32768, rope_theta=1000000.0, hidden_act="silu") | {
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "use_mrope": False,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
PHI_4_MINI = shape(3072, 32, 24, 8, max_position_embeddings=131072, hidden_act="silu", sliding_window=262144) | {
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
GEMMA_2 = shape(2304, 26, 8, 4, head_dim=256, max_position_embeddings=8192, query_pre_attn_scalar=256) | {
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA_3 = shape(1152, 26, 4, 1, head_dim=256, max_position_embeddings=32768, query_pre_attn_scalar=256) | {
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
QWEN3_MOE = shape(2048, 48, 32, 4, head_dim=128, max_position_embeddings=40960, rope_theta=1000000.0) | {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}


def test_llama_3_1_config_is_read() -> None:
    config = read("LlamaForCausalLM", LLAMA_3_1)
    assert (config.max_context, config.eos, config.tied) == (131072, (128001, 128008, 128009), False)
    assert (
        config.ropes[0].kind,
        config.ropes[0].parameters["original_max_position_embeddings"],
        config.ropes[0].parameters["rope_theta"],
    ) == ("llama3", 8192, 500000.0)
    assert {layer.window for layer in config.attention} == {None}


def test_qwen_2_5_ignores_its_window_and_is_extended_by_yarn() -> None:
    config = read("Qwen2ForCausalLM", QWEN_2_5)
    assert (config.max_context, config.qkv_bias, config.output_bias) == (32768, True, False)
    assert {layer.window for layer in config.attention} == {None}
    assert read("Qwen2ForCausalLM", QWEN_2_5 | {"rope_scaling": YARN}).max_context == 131072
    windowed = read("Qwen2ForCausalLM", QWEN_2_5 | {"use_sliding_window": True, "max_window_layers": 21})
    assert [layer.window for layer in windowed.attention] == [None] * 21 + [131072] * 7


@pytest.mark.parametrize(
    ("more", "window"), [({"sliding_window": 4096}, 4096), ({"sliding_window": None}, None), ({}, 4096)]
)
def test_mistral_config_is_read(more: dict[str, Any], window: int | None) -> None:
    fields = shape(4096, 32, 32, 8, max_position_embeddings=32768, rope_theta=10000.0, hidden_act="silu")
    assert {layer.window for layer in read("MistralForCausalLM", fields | more).attention} == {window}


def test_phi_4_mini_config_is_read() -> None:
    config = read("Phi3ForCausalLM", PHI_4_MINI)
    assert (config.head_dim, config.ropes[0].dim, config.ropes[0].parameters["original_max_position_embeddings"]) == (
        128,
        96,
        4096,
    )
    assert (config.fused, config.tied, config.max_context) == (True, True, 131072)


def test_gemma_2_and_3_configs_are_read() -> None:
    config = read("Gemma2ForCausalLM", GEMMA_2)
    assert [layer.window for layer in config.attention[:4]] == [4096, None, 4096, None]
    assert (config.attention[0].softcap, config.logit_softcap, config.attention[0].scale) == (50.0, 30.0, 1 / 16)
    config = read("Gemma3ForCausalLM", GEMMA_3)
    assert [layer.window for layer in config.attention[:7]] == [512] * 5 + [None, 512]
    assert [rope.parameters["rope_theta"] for rope in config.ropes[:7]] == [1e4] * 5 + [1e6, 1e4]
    assert (config.attention[0].softcap, config.logit_softcap, config.tied) == (None, None, True)


def test_mixture_of_experts_configs_are_read() -> None:
    experts = read("Qwen3MoeForCausalLM", QWEN3_MOE).experts
    assert experts is not None
    assert (experts.num_experts, experts.intermediate, experts.routing) == (
        128,
        768,
        RoutingConfig(8, is_normalized=True),
    )
    assert experts.layers == frozenset(range(48))
    mixtral = shape(4096, 32, 32, 8, max_position_embeddings=32768, rope_theta=1e6, hidden_act="silu")
    mixtral |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "output_router_logits": False}
    experts = read("MixtralForCausalLM", mixtral | {"router_aux_loss_coef": 0.02}).experts
    assert experts is not None
    assert (experts.num_experts, experts.intermediate, experts.routing) == (
        8,
        4 * 4096,
        RoutingConfig(2, is_normalized=True),
    )


def test_smollm3_and_olmo_3_have_layers_of_two_kinds() -> None:
    fields = shape(2048, 8, 16, 4, max_position_embeddings=65536, rope_theta=5e6, no_rope_layer_interval=4)
    config = read("SmolLM3ForCausalLM", fields | {"use_sliding_window": False, "sliding_window": None})
    assert [rope.kind for rope in config.ropes] == ["default", "default", "default", "none"] * 2
    assert config.tied
    fields = shape(4096, 8, 32, 32, max_position_embeddings=65536, rope_theta=500000, sliding_window=4096)
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    config = read("Olmo3ForCausalLM", fields | {"rope_scaling": scaling})
    assert [layer.window for layer in config.attention] == [4096, 4096, 4096, None] * 2
    assert [rope.kind for rope in config.ropes] == ["default", "default", "default", "yarn"] * 2
    assert (config.pre_norms, config.post_norms, config.qk_norm) == (False, True, "projection")


def test_ministral_3_scales_queries_beyond_its_original_context() -> None:
    fields = shape(3072, 26, 32, 8, head_dim=128, max_position_embeddings=262144)
    settings = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
    more = {"rope_theta": 1e6, "max_position_embeddings": 262144, "mscale": 1.0, "mscale_all_dim": 1.0}
    [rope] = set(read("Ministral3ForCausalLM", fields | {"rope_parameters": settings | more}).ropes)
    assert (rope.kind, rope.query_scaling, len(rope.tables(16384))) == ("yarn", 0.1, 2)
    *_, factors = rope.tables(50000)
    torch.testing.assert_close(factors[[0, 16383, 16384, 49999], 0], 1 + 0.1 * torch.tensor([1.0, 1, 2, 4]).log())
    assert read("Ministral3ForCausalLM", fields).ropes[0].query_scaling == 0.1


def test_granites_multipliers_are_in_the_scales_of_other_operations() -> None:
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 16.0}
    fields = shape(4096, 40, 32, 8, max_position_embeddings=131072, hidden_act="silu", attention_multiplier=0.0078125)
    config = read("GraniteForCausalLM", fields | factors)
    assert (config.embedding_scale, config.hidden_scale, config.logit_scale) == (48.0, 0.25, 1 / 16)
    assert (config.attention[0].scale, config.norm_eps) == (0.0078125, 1e-5 * 16)


def test_gpt_oss_config_is_read() -> None:
    fields = shape(2880, 24, 64, 8, head_dim=64, max_position_embeddings=131072, rope_theta=150000, hidden_act="silu")
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    more = {"attention_bias": True, "experts_per_token": 4, "initial_context_length": 4096, "sliding_window": 128}
    more |= {"num_experts_per_tok": 4, "num_local_experts": 32, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0}
    more |= {"intermediate_size": 2880, "rope_scaling": scaling | {"rope_type": "yarn", "truncate": False}}
    config = read("GptOssForCausalLM", fields | more)
    assert config.experts is not None
    assert (config.experts.clamp, config.experts.intermediate) == ((1.702, 7.0), 2880)
    assert [layer.window for layer in config.attention[:3]] == [128, None, 128]
    assert (config.max_context, config.output_bias, config.cpu_only_part) == (131072, True, None)


def test_lfm2_config_is_read() -> None:
    fields = shape(2048, 6, 32, 8, max_position_embeddings=128000, rope_theta=1e6, norm_eps=1e-4, conv_L_cache=3)
    fields |= {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
    }
    fields |= {
        "block_multiple_of": 256,
        "block_norm_eps": 1e-5,
        "conv_bias": False,
        "conv_dim": 2048,
        "conv_dim_out": 2048,
    }
    fields |= {"full_attn_idxs": [2, 5], "num_heads": 32, "use_pos_enc": True, "tie_embedding": True}
    config = read("Lfm2ForCausalLM", fields)
    assert (config.state_layers, len(config.attention), config.convolution_width) == (frozenset({0, 1, 3, 4}), 2, 3)
    assert (config.intermediate, config.norm_eps, config.tied) == (8192, 1e-4, True)
    assert config.states[0].shapes == ((2, 2048),)
    same = read("Lfm2ForCausalLM", fields | {"block_ff_dim": 8192, "block_auto_adjust_ff_dim": False})
    assert same.intermediate == 8192
    assert read("Lfm2ForCausalLM", fields | {"block_ff_dim": 10000}).intermediate == 6912


def test_gemma_4_configs_are_read() -> None:
    fields = shape(1536, 12, 8, 1, head_dim=256, global_head_dim=512, max_position_embeddings=131072)
    fields |= {"hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "sliding_window": 512}
    small = fields | {"num_kv_shared_layers": 5, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}
    small |= {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2 + ["sliding_attention"] * 2}
    config = read("Gemma4ForCausalLM", small)
    assert [layer.head_dim for layer in config.attention] == [256, 256, 256, 256, 512, 256, 256]
    assert config.num_layers == 12
    assert {layer.scale for layer in config.attention} == {1.0}
    assert config.gemma4 is not None
    assert config.gemma4.sources == (*[None] * 7, 6, 6, 4, 6, 4)
    assert config.gemma4.calls == (*range(7), 6, 6, 4, 6, 4)
    assert config.gemma4.intermediate == (4 * 1536,) * 7 + (8 * 1536,) * 5
    assert [rope.kind for rope in config.ropes[3:5]] == ["default", "proportional"]
    assert (config.norm_offset, config.tied, config.logit_softcap) == (0.0, True, 30.0)
    large = fields | {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "num_key_value_heads": 8}
    config = read("Gemma4ForCausalLM", large | {"use_bidirectional_attention": "vision"})
    assert [layer.kv_heads for layer in config.attention] == [8, 8, 8, 8, 8, 4] * 2
    assert config.gemma4 is not None
    assert config.gemma4.keys_are_values == frozenset({5, 11})


def test_bookkeeping_that_fine_tuners_leave_behind_is_ignored() -> None:
    fields = LLAMA_3_1 | {"_model_name_or_path": "a", "_commit_hash": "b"}
    assert read("LlamaForCausalLM", fields).hidden_size == 4096


def _list_defined() -> list[str]:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return sorted({name for name in names if isinstance(name, str) and is_defined(name)})


@pytest.mark.parametrize("architecture", _list_defined())
def test_the_config_that_transformers_writes_by_default_is_read(architecture: str, tmp_path: Path) -> None:
    """A published config may leave out what its class has no need of."""
    fields = {"DeepseekV2ForCausalLM": {"num_experts_per_tok": 6}, "Lfm2ForCausalLM": {"full_attn_idxs": [2, 5]}}
    config = getattr(transformers, architecture).config_class(**fields.get(architecture, {}))
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    assert isinstance(choose_decoder(read_raw_config(tmp_path)), DecoderConfig)
