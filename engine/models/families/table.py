"""The architectures that the decoder computes, as their differences from Llama."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.models.delta_config import FIELDS as DELTA_FIELDS
from engine.models.families.config import Head


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of an architecture from Llama."""

    extra_fields: frozenset[str] = frozenset()
    """Config fields that only this family has."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of transformers for fields that configs leave out and that no tensor's shape reveals."""
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    is_gemma: bool = False
    """Scale embeddings, normalise before and after each part, and use gelu."""
    fused: bool = False
    has_classifiers: bool = True
    delta: Literal["interleaved", "separate"] | None = None
    """The order of the projections of layers with a gated delta rule, of a family that has them."""


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
_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})

FAMILIES = {
    "Llama": Family(frozenset({"attention_bias", "mlp_bias"})),
    "Mistral": Family(frozenset({"sliding_window"}), {"sliding_window": 4096}),
    "Mixtral": Family(frozenset({"sliding_window"}) | _EXPERTS, rope_theta=1_000_000.0),
    "Qwen2": Family(_WINDOWS, {"sliding_window": 4096}),
    "Qwen3": Family(_WINDOWS | {"attention_bias"}, {"sliding_window": 4096}, qk_norm=True),
    "Qwen3Moe": Family(
        frozenset({"sliding_window", "use_sliding_window", "attention_bias", "moe_intermediate_size"})
        | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "max_window_layers"}
        | _EXPERTS,
        {"sliding_window": 4096},
        qk_norm=True,
    ),
    "Phi3": Family(frozenset({"sliding_window"}), fused=True),
    "Gemma2": Family(
        _GEMMA | {"attention_bias", "attn_logit_softcapping"},
        _GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        is_gemma=True,
    ),
    "Gemma3": Family(
        _GEMMA | {"attention_bias", "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        _GEMMA_DEFAULTS,
        qk_norm=True,
        is_gemma=True,
        has_classifiers=False,
    ),
    "Qwen3Next": Family(_DELTA | _EXPERTS | _SHARED_EXPERT, _DELTA_DEFAULTS, qk_norm=True, delta="interleaved"),
    "Qwen3_5": Family(_DELTA, _DELTA_DEFAULTS, qk_norm=True, delta="separate"),
    "Qwen3_5Moe": Family(_DELTA | _EXPERTS | _SHARED_EXPERT, _DELTA_DEFAULTS, qk_norm=True, delta="separate"),
}
"""Families by the prefix of the architecture's name."""

REWARD_HEADS = {
    # https://huggingface.co/Qwen/Qwen2.5-Math-PRM-7B: two layers, the labels bad and good.
    "Qwen2ForProcessRewardModel": (2, Head(("score.0", "score.2"), bias=True, may_have_lm_head=True)),
    # https://huggingface.co/Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B: TRL's value head.
    "Qwen2ForPrmModel": (1, Head(("v_head.summary",), bias=True, may_have_lm_head=True)),
}
"""Architectures that transformers does not have: their number of labels and their head."""
