"""Write small models with Mamba-2 as GGUF files, as llama.cpp's conversion does."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter

ARCHITECTURES = "mamba2", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"
_ONE_PART = "mamba2", "nemotron_h", "nemotron_h_moe"


def prepare_mamba(architecture: str, tensors: dict[str, Any], config: dict[str, Any], names: Any) -> dict[str, Any]:
    """Return the tensors by the names in the file, in llama.cpp's form but for the order of queries and keys."""
    prepared: dict[str, Any] = {}
    for name, values in tensors.items():
        if architecture in _ONE_PART:
            name = re.sub(r"^model\.", "backbone.", name)
            values = values if values.ndim < 3 or "conv1d" in name else np.ascontiguousarray(values)
        if architecture == "falcon-h1":
            values = multiply_factors(name, values, config)
        for part, rows in split_rows(architecture, name, values, config).items():
            prepared[find_name(part, names)] = np.ascontiguousarray(reshape(part, rows, config))
    return prepared


def find_name(name: str, names: Any) -> str:
    if name.endswith((".A_log", ".D")) or names.get_name(name):
        return str(names.get_name(name))
    if match := re.fullmatch(r"backbone\.layers\.(\d+)\.mixer\.experts\.(\w+)_proj(\.weight)?", name):
        return f"blk.{match[1]}.ffn_{match[2]}_exps.weight"
    name = name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
    stem, _, suffix = name.rpartition(".")
    found = names.get_name(stem)
    assert found is not None, name
    return f"{found}.{suffix}"


def reshape(name: str, values: Any, config: dict[str, Any]) -> Any:
    if name.endswith(".A_log"):
        return -torch.from_numpy(values).exp().numpy()[:, None]
    if name.endswith(".D"):
        return values[:, None]
    if "conv1d.weight" in name:
        return values.squeeze()
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return values.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
    return values


def split_rows(architecture: str, name: str, values: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a tensor in which the rows of gate and up of Granite 4 are together."""
    if architecture != "granitehybrid" or "_linear" not in name:
        return {name: values}
    has_experts = bool(config["num_local_experts"])
    module = "mlp.experts" if "sparse_moe" in name else "mlp.shared_expert" if has_experts else "mlp"
    stem = re.sub(r"(block_sparse_moe|shared_mlp)\.\w+_linear", module, name).removesuffix(".weight")
    if "output_linear" in name:
        return {f"{stem}.down_proj.weight": values}
    gate, up = np.split(values, 2, axis=-2)
    return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}


def multiply_factors(name: str, values: Any, config: dict[str, Any]) -> Any:
    """Return a tensor of Falcon-H1 with the factors that llama.cpp does not know."""
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    taken = config["attention_in_multiplier"]
    for part, factor in (
        ("down_proj", down),
        ("gate_proj", gate),
        ("k_proj", config["key_multiplier"] * taken),
        ("q_proj", taken),
        ("v_proj", taken),
        ("o_proj", config["attention_out_multiplier"]),
        ("out_proj", config["ssm_out_multiplier"]),
        ("lm_head", config["lm_head_multiplier"]),
        ("embed_tokens", config["embedding_multiplier"]),
    ):
        if part in name:
            return values * np.float32(factor)
    if "in_proj" not in name:
        return values
    inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    widths = [inner, inner, groups, groups, config["mamba_n_heads"]]
    factors = np.repeat(config.get("ssm_multipliers") or [1.0] * 5, widths) * config["ssm_in_multiplier"]
    return values * factors.astype(np.float32).reshape(-1, *[1] * (values.ndim - 1))


def write_mamba_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Write the metadata."""
    kinds = list_kinds(writer.arch, config)
    attended = [kind == "attention" for kind in kinds]
    is_nemotron, is_mamba2 = writer.arch.startswith("nemotron"), writer.arch == "mamba2"
    writer.add_context_length(1 << 20 if is_mamba2 else config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(len(kinds))
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"] if is_nemotron or is_mamba2 else config["rms_norm_eps"])
    writer.add_head_count(0 if is_mamba2 else config["num_attention_heads"])
    if not is_mamba2:
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv(kv_heads if all(attended) else [kv_heads * one for one in attended])
    if is_nemotron:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        width = config["moe_intermediate_size" if writer.arch.endswith("moe") else "intermediate_size"]
        writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in kinds])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    else:
        writer.add_feed_forward_length(0 if is_mamba2 else config["intermediate_size"])
    write_states(writer, config)
    if writer.arch == "falcon-h1":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    elif writer.arch == "granitehybrid":
        write_granite(writer, config)
    elif writer.arch == "nemotron_h_moe":
        write_nemotron_experts(writer, config)


def list_kinds(architecture: str, config: dict[str, Any]) -> list[str]:
    """Return for each layer ``mamba``, ``attention``, or what else it is."""
    types = {"linear_attention": "mamba", "full_attention": "attention"}
    if architecture.startswith("nemotron"):
        return [types.get(kind, kind) for kind in config["layers_block_type"]]
    if architecture == "granitehybrid":
        return [types.get(kind, kind) for kind in config["layer_types"]]
    return ["mamba" if architecture == "mamba2" else "attention"] * config["num_hidden_layers"]


def write_states(writer: GGUFWriter, config: dict[str, Any]) -> None:
    def get(*names: str) -> int:
        return next(int(config[name]) for name in names if config.get(name) is not None)

    heads = get("mamba_n_heads", "mamba_num_heads", "num_heads")
    head_dim = get("mamba_d_head", "mamba_head_dim", "head_dim")
    writer.add_ssm_conv_kernel(get("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(get("mamba_d_state", "ssm_state_size", "state_size"))
    writer.add_ssm_group_count(get("mamba_n_groups", "n_groups"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)


def write_granite(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["num_local_experts"]:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def write_nemotron_experts(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    if config["n_group"] > 1:
        writer.add_expert_group_used_count(config["topk_group"])
    if config.get("moe_latent_size"):
        writer.add_moe_latent_size(config["moe_latent_size"])
