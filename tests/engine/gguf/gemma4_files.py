"""Write small models of Gemma 4 as GGUF files, as llama.cpp's conversion does."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf import GGUFWriter


def prepare_gemma4(tensors: dict[str, Any], names: Any) -> dict[str, Any]:
    """Return the tensors by the names in the file."""
    prepared: dict[str, Any] = {}
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".")
        layer = name.split(".")[2]
        if name.endswith("router.scale"):
            prepared[f"blk.{layer}.ffn_gate_inp.scale"] = values
        elif name.endswith("per_expert_scale"):
            prepared[f"blk.{layer}.ffn_down_exps.scale"] = values
        elif kind in ("layer_scalar", "gate_up_proj", "down_proj"):
            prepared[f"{names.get_name(name)}.weight"] = values
        else:
            prepared[f"{names.get_name(stem)}.{kind}"] = values
    return prepared


def write_gemma4_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Write the metadata, and the divisors that stand for pairs that are not rotated."""
    layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = {int(layer): value for layer, value in (config.get("per_layer_config") or {}).items()}
    by_layer = [config | own.get(layer, {}) for layer in range(layers)]
    full = by_layer[slides.index(False)]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    shared = config["num_kv_shared_layers"]
    width, wide = config["intermediate_size"], bool(shared and config["use_double_wide_mlp"])
    writer.add_feed_forward_length(
        [width * (1 + (layer >= layers - shared)) for layer in range(layers)] if wide else width
    )
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([one["num_key_value_heads"] for one in by_layer])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window_pattern(slides)
    for add, size in (
        (writer.add_key_length, full["head_dim"]),
        (writer.add_value_length, full["head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]),
        (writer.add_value_length_swa, config["head_dim"]),
        (writer.add_rope_dimension_count, full["head_dim"]),
        (writer.add_rope_dimension_count_swa, config["head_dim"]),
    ):
        add(size)
    if config.get("enable_moe_block"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    pairs = full["head_dim"] // 2
    rotated = int(full["head_dim"] * rope["full_attention"]["partial_rotary_factor"] / 2)
    divisors = np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)
    writer.add_tensor(gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight", divisors)
