"""Fields of ``config.json`` of DeepSeek-V2 and V3 and of GLM-4.7-Flash, from the metadata of a GGUF file.

llama.cpp names all of them ``deepseek2``. Newer files say how large keys and values are that are made of latents, and
have the matrices that make them apart, so that keys and values need not be made.
"""

from __future__ import annotations

from typing import Any

from engine.gguf.metadata import Metadata

_SOFTMAX, _SIGMOID = 1, 2


def read_latent_fields(metadata: Metadata) -> dict[str, Any]:
    """Return the fields. Raises ``EngineError`` naming what is not supported."""
    rank, rotated = int(metadata.require("attention.kv_lora_rank")), int(metadata.require("rope.dimension_count"))
    key, value = int(metadata.require("attention.key_length")), int(metadata.require("attention.value_length"))
    if "attention.key_length_mla" in metadata:
        metadata.expect("attention.key_length", rank + rotated)
        metadata.expect("attention.value_length", rank)
        key = int(metadata.require("attention.key_length_mla"))
        value = int(metadata.require("attention.value_length_mla"))
    score = int(metadata.get("expert_gating_func") or _SOFTMAX)
    if score not in (_SOFTMAX, _SIGMOID):
        raise metadata.refuse("expert_gating_func", score, f"{_SOFTMAX} or {_SIGMOID}")
    groups = int(metadata.get("expert_group_count") or 1)
    name = "3" if score == _SIGMOID else "2"
    fields = {
        "architectures": [f"DeepseekV{name}ForCausalLM"],
        "model_type": f"deepseek_v{name}",
        "head_dim": rotated,
        "kv_lora_rank": rank,
        "q_lora_rank": int(metadata.get("attention.q_lora_rank") or 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "first_k_dense_replace": int(metadata.get("leading_dense_block_count", 0)),
        "n_routed_experts": int(metadata.require("expert_count")),
        "num_experts_per_tok": int(metadata.require("expert_used_count")),
        "n_shared_experts": int(metadata.get("expert_shared_count", 0)),
        "moe_intermediate_size": int(metadata.require("expert_feed_forward_length")),
        "routed_scaling_factor": metadata.get_number("expert_weights_scale", 1.0, is_zero_unset=True),
        "n_group": groups,
        "topk_group": int(metadata.get("expert_group_used_count") or 1),
    }
    if score == _SIGMOID:
        return fields | {"norm_topk_prob": bool(metadata.get("expert_weights_norm", False))}
    metadata.expect("expert_weights_norm", False)
    return fields | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
