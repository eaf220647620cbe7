"""The architectures that the decoder computes, as their differences from Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.models.delta_config import FIELDS as DELTA_FIELDS
from engine.models.families.config import Head
from engine.models.families.gemma4 import DEFAULTS as GEMMA4_DEFAULTS
from engine.models.families.gemma4 import FIELDS as GEMMA4_FIELDS
from engine.models.families.mamba import DEFAULTS as MAMBA_DEFAULTS
from engine.models.families.mamba import FIELDS as MAMBA_FIELDS
from engine.models.latent_config import FIELDS as LATENT_FIELDS
from engine.models.latent_config import INDEXER_FIELDS


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of an architecture from Llama."""

    extra_fields: frozenset[str] = frozenset()
    """Config fields that only this family has."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of transformers for fields that configs leave out and that no tensor's shape reveals."""
    rope_theta: float = 10_000.0
    qk_norm: Literal["head", "projection"] | None = None
    norms: Literal["before", "around", "after"] = "before"
    """Place of the norms in a layer: each part has them on its input, on its output, or on both."""
    full_period: int | None = None
    """Every such layer sees all keys and the others have the window, unless the config lists the layers' types."""
    is_gemma: bool = False
    """Scale embeddings and use gelu."""
    norm_offset: float = 0.0
    """Offset of every norm's weights."""
    fused: bool = False
    has_sinks: bool = False
    has_classifiers: bool = True
    aliases: dict[str, str] = field(default_factory=dict)
    """Config fields by the names that this family has for them."""
    has_convolutions: bool = False
    """Most layers have a short convolution instead of attention."""
    delta: Literal["interleaved", "separate"] | None = None
    """The order of the projections of layers with a gated delta rule, of a family that has them."""
    has_latents: bool = False
    """The layers have multi-head latent attention."""
    indexer_is_interleaved: bool | None = None
    """The order of rotated dimensions of indexers (``IndexerConfig``), of a family whose layers have them."""
    mamba: Literal["granite", "bamba", "single"] | None = None
    """The names of the tensors of a family that has layers with Mamba-2; in ``single`` a layer is one part alone."""


_WINDOWS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_GEMMA = frozenset(
    {"hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "sliding_window", "layer_types"}
)
_GEMMA_DEFAULTS = {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_DELTA = DELTA_FIELDS | {
    *("attention_bias", "attn_output_gate", "mamba_ssm_dtype", "mlp_only_layers"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers"),
}
_DELTA_DEFAULTS = {"partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
_SHARED_EXPERT = frozenset(
    {"moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step"}
)
_MINISTRAL_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
_GPT_OSS_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
_LFM2_MLP = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
_LFM2_UNREAD = frozenset(
    {
        *("block_dim", "block_ff_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
        *("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
        *("num_heads", "use_pos_enc"),
    }
)
"""Fields of Liquid's own code that transformers does not read, or reads by another name."""
_MULTIPLIERS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
_GROUPED_EXPERTS = frozenset(
    {
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        *("routed_scaling_factor", "n_group", "topk_group", "topk_method", "scoring_func", "first_k_dense_replace"),
        "mlp_layer_types",
        *("num_nextn_predict_layers", "num_mtp_layers"),  # layers that are not read
        *("aux_loss_alpha", "seq_aux", "ep_size"),  # training only
    }
)
_LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK_V2 = _LATENT_SIZES | {
    **{"q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    **{"n_group": None, "topk_group": None, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
}
_DEEPSEEK_V3 = _LATENT_SIZES | {
    **{"q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048},
    **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "first_k_dense_replace": 3,
}
_GLM4_LITE = _LATENT_SIZES | {
    **{"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "moe_intermediate_size": 1536},
    **{"n_routed_experts": 64, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4},
    **{"norm_topk_prob": True, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1},
}
_GLM5 = _LATENT_SIZES | {
    **{"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "moe_intermediate_size": 2048},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
}
_UNREAD_BY_MAMBA = frozenset(
    {"num_logits_to_keep", "z_loss_coefficient", "residual_in_fp32", "rescale_prenorm_residual"}
)
_MAMBA_MULTIPLIERS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_FALCON_H1 = frozenset(
    {
        *("mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate", "mlp_multipliers", "ssm_multipliers"),
        *(*_MAMBA_MULTIPLIERS, "mlp_expansion_factor", "attn_layer_indices"),
    }
)
_NEMOTRON_NAMES = {
    **{"mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "ssm_state_size": "mamba_d_state"},
    **{"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"},
    **{"use_bias": "mamba_proj_bias", "layer_norm_epsilon": "rms_norm_eps"},
}
_NEMOTRON: dict[str, Any] = {
    **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
    **{"use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5, "time_step_min": 0.001},
    **{"head_dim": 128, "num_key_value_heads": 8, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 7688, "num_experts_per_tok": 2},
    **{"moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    **{"norm_topk_prob": True, "rms_norm_eps": 1e-5, "intermediate_size": 21504},
}
_NEMOTRON_UNREAD = frozenset(
    {
        *("expand", "chunk_size", "time_step_limit", "time_step_max", "time_step_floor", "norm_eps"),
        "attention_head_dim",  # in older configs, whose size of heads is the default
        *("mamba_ssm_cache_dtype", "use_mamba_kernels", "mamba_proj_bias", "moe_shared_expert_overlap"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    }
)
_MAMBA2_NAMES = {
    **{"num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state_size": "mamba_d_state"},
    **{"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"},
    **{"use_bias": "mamba_proj_bias", "expand": "mamba_expand", "layer_norm_epsilon": "rms_norm_eps"},
}
_MAMBA2_UNREAD = frozenset(
    {
        *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "chunk_size"),
        *("time_step_init_scheme", "rms_norm", "norm_before_gate"),
    }
)
"""Fields that transformers does not read, or that only set initial weights."""
_MAMBA2: dict[str, Any] = {
    **{"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2},
    **{"use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5, "time_step_limit": (0.0, math.inf)},
    **{"intermediate_size": 0, "max_position_embeddings": 1 << 17},
}
_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})

FAMILIES = {
    "Llama": Family(frozenset({"attention_bias", "mlp_bias"})),
    "Mistral": Family(frozenset({"sliding_window"}), {"sliding_window": 4096}),
    "Mixtral": Family(frozenset({"sliding_window"}) | _EXPERTS, rope_theta=1_000_000.0),
    "Qwen2": Family(_WINDOWS, {"sliding_window": 4096}),
    "Qwen3": Family(_WINDOWS | {"attention_bias"}, {"sliding_window": 4096}, qk_norm="head"),
    "Qwen3Moe": Family(
        frozenset({"sliding_window", "use_sliding_window", "attention_bias", "moe_intermediate_size"})
        | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "max_window_layers"}
        | _EXPERTS,
        {"sliding_window": 4096},
        qk_norm="head",
    ),
    "Phi3": Family(frozenset({"sliding_window"}), fused=True),
    "Gemma2": Family(
        _GEMMA | {"attention_bias", "attn_logit_softcapping"},
        _GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        norms="around",
        full_period=2,
        is_gemma=True,
        norm_offset=1.0,
    ),
    "Gemma3": Family(
        _GEMMA | {"attention_bias", "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        _GEMMA_DEFAULTS,
        qk_norm="head",
        norms="around",
        full_period=6,
        is_gemma=True,
        norm_offset=1.0,
        has_classifiers=False,
    ),
    "Gemma4": Family(
        GEMMA4_FIELDS,
        GEMMA4_DEFAULTS,
        qk_norm="head",
        norms="around",
        full_period=6,
        is_gemma=True,
        has_classifiers=False,
    ),
    "SmolLM3": Family(
        _WINDOWS | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
        {"tie_word_embeddings": True},
        rope_theta=2_000_000.0,
        has_classifiers=False,
    ),
    "Olmo3": Family(
        frozenset({"sliding_window", "layer_types", "attention_bias"}),
        {"sliding_window": 4096},
        rope_theta=500_000.0,
        qk_norm="projection",
        norms="after",
        full_period=4,
        has_classifiers=False,
    ),
    "Ministral3": Family(
        frozenset({"sliding_window"}), {"head_dim": 128, "rope_parameters": _MINISTRAL_ROPE}, has_classifiers=False
    ),
    "Granite": Family(
        frozenset({"attention_bias", "mlp_bias", *_MULTIPLIERS}),
        dict.fromkeys(_MULTIPLIERS, 1.0),
        has_classifiers=False,
    ),
    "GptOss": Family(
        frozenset({"sliding_window", "layer_types", "attention_bias", "swiglu_alpha", "swiglu_limit"})
        | {"initial_context_length", "experts_per_token"}  # names of other fields in OpenAI's own code
        | _EXPERTS,
        {"sliding_window": 128, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
        | {"head_dim": 64, "num_experts_per_tok": 4, "rope_parameters": _GPT_OSS_ROPE},
        rope_theta=150_000.0,
        full_period=2,
        has_sinks=True,
        has_classifiers=False,
    ),
    "Lfm2": Family(
        frozenset({"layer_types", "full_attn_idxs", "norm_eps", "tie_embedding", "conv_L_cache", *_LFM2_MLP})
        | _LFM2_UNREAD,
        {"norm_eps": 1e-5, "tie_word_embeddings": True, "conv_L_cache": 3} | _LFM2_MLP,
        rope_theta=1_000_000.0,
        qk_norm="head",
        aliases={
            "norm_eps": "rms_norm_eps",
            "tie_embedding": "tie_word_embeddings",
            "block_ff_dim": "intermediate_size",
        },
        has_convolutions=True,
        has_classifiers=False,
    ),
    "Qwen3Next": Family(
        _DELTA | _EXPERTS | _SHARED_EXPERT, _DELTA_DEFAULTS, qk_norm="head", delta="interleaved", norm_offset=1.0
    ),
    "Qwen3_5": Family(_DELTA, _DELTA_DEFAULTS, qk_norm="head", delta="separate", norm_offset=1.0),
    "Qwen3_5Moe": Family(
        _DELTA | _EXPERTS | _SHARED_EXPERT, _DELTA_DEFAULTS, qk_norm="head", delta="separate", norm_offset=1.0
    ),
    "DeepseekV2": Family(
        LATENT_FIELDS | _GROUPED_EXPERTS | {"mlp_bias"}, _DEEPSEEK_V2, has_classifiers=False, has_latents=True
    ),
    "DeepseekV3": Family(LATENT_FIELDS | _GROUPED_EXPERTS, _DEEPSEEK_V3, has_classifiers=False, has_latents=True),
    "DeepseekV32": Family(
        LATENT_FIELDS | _GROUPED_EXPERTS | INDEXER_FIELDS,
        _DEEPSEEK_V3 | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
        has_classifiers=False,
        has_latents=True,
        indexer_is_interleaved=False,
    ),
    "GlmMoeDsa": Family(
        LATENT_FIELDS | _GROUPED_EXPERTS | INDEXER_FIELDS,
        _GLM5 | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32},
        has_classifiers=False,
        has_latents=True,
        indexer_is_interleaved=True,
    ),
    "GraniteMoeHybrid": Family(
        MAMBA_FIELDS
        | _EXPERTS
        | {"attention_bias", "layer_types", "shared_intermediate_size", "position_embedding_type", *_MULTIPLIERS}
        | {"init_method"},
        MAMBA_DEFAULTS
        | dict.fromkeys(_MULTIPLIERS, 1.0)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "rms_norm_eps": 1e-6},
        mamba="granite",
        has_classifiers=False,
    ),
    "Bamba": Family(
        MAMBA_FIELDS | _UNREAD_BY_MAMBA | {"attention_bias", "mlp_bias", "attn_layer_indices", "attn_rotary_emb"},
        MAMBA_DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        mamba="bamba",
        has_classifiers=False,
    ),
    "FalconH1": Family(
        (MAMBA_FIELDS | _UNREAD_BY_MAMBA | _FALCON_H1) - {"mamba_proj_bias"},
        MAMBA_DEFAULTS
        | dict.fromkeys(_MAMBA_MULTIPLIERS, 1.0)
        | {"mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True, "rms_norm_eps": 1e-5}
        | {"num_key_value_heads": 8, "mlp_multipliers": None, "ssm_multipliers": None},
        mamba="bamba",
        has_classifiers=False,
    ),
    "NemotronH": Family(
        frozenset({*_NEMOTRON, "layers_block_type", "hybrid_override_pattern", "mlp_bias", "moe_latent_size"})
        | _NEMOTRON_UNREAD
        | _UNREAD_BY_MAMBA,
        _NEMOTRON,
        aliases=_NEMOTRON_NAMES,
        mamba="single",
        has_classifiers=False,
    ),
    "Mamba2": Family(
        frozenset(_MAMBA2) | _MAMBA2_UNREAD | _UNREAD_BY_MAMBA,
        _MAMBA2,
        aliases=_MAMBA2_NAMES,
        mamba="single",
        has_classifiers=False,
    ),
    "Glm4MoeLite": Family(LATENT_FIELDS | _GROUPED_EXPERTS, _GLM4_LITE, has_classifiers=False, has_latents=True),
}
"""Families by the prefix of the architecture's name."""

REWARD_HEADS = {
    # https://huggingface.co/Qwen/Qwen2.5-Math-PRM-7B: two layers, the labels bad and good.
    "Qwen2ForProcessRewardModel": (2, Head(("score.0", "score.2"), bias=True, may_have_lm_head=True)),
    # https://huggingface.co/Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B: TRL's value head.
    "Qwen2ForPrmModel": (1, Head(("v_head.summary",), bias=True, may_have_lm_head=True)),
}
"""Architectures that transformers does not have: their number of labels and their head."""
