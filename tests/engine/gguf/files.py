"""Write small checkpoints as GGUF files, as llama.cpp's conversion does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from tests.engine.gguf.gemma4_files import prepare_gemma4, write_gemma4_config
from tests.engine.gguf.mamba_files import ARCHITECTURES as MAMBA
from tests.engine.gguf.mamba_files import prepare_mamba, write_mamba_config
from tests.engine.gguf.q4_k import COLUMNS, quantize_q4_k

Floats = npt.NDArray[np.float32]
F32 = GGMLQuantizationType.F32
PERMUTED = "llama", "smollm3", "granite", "mistral3", "granitehybrid", "nemotron_h", "nemotron_h_moe"


def write_gguf(
    checkpoint: Path,
    path: Path,
    architecture: str,
    kind: GGMLQuantizationType = F32,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write a checkpoint of ``tests.engine.conftest`` to ``path``; its matrices are quantised to ``kind``."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    write_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), config["vocab_size"])
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    tensors = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    tensors, predicts = rename_prediction(tensors, layers)
    names = gguf.get_tensor_name_map(kinds[architecture], layers + predicts)
    if architecture in MAMBA:
        write_mamba_config(writer, config)
        prepared = prepare_mamba(architecture, stack_experts(tensors), config, names)
    elif architecture == "gemma4":
        write_gemma4_config(writer, config)
        prepared = prepare_gemma4(tensors, names)
    else:
        write_config(writer, config)
        prepared = translate(prepare(tensors, config), names)
    for name, values in prepared.items():
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType.MXFP4)
            continue
        tensor = convert(architecture, config, name, values.astype(np.float32))
        if tensor.ndim > 1 and name.endswith(".weight") and kind != F32 and not re.search(r"conv|ssm_norm", name):
            blocks, chosen = quantize(tensor, kind)
            writer.add_tensor(name, blocks, raw_dtype=chosen)
        else:
            writer.add_tensor(name, tensor)
    if architecture.startswith(("qwen2vl", "qwen3vl")):
        writer.add_rope_dimension_sections([2, 3, 3, 0])
        writer.add_uint32(f"{architecture}.n_deepstack_layers", 3)
    if predicts:
        writer.kv_data[0][f"{architecture}.block_count"].value = layers + 1
        writer.add_nextn_predict_layers(1)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(values: Floats, kind: GGMLQuantizationType) -> tuple[Any, GGMLQuantizationType]:
    """Return the blocks and their kind, which for rows that have no whole blocks of Q4_K is Q8_0."""
    if kind != GGMLQuantizationType.Q4_K:
        return gguf.quantize(values, kind), kind
    if values.shape[-1] % COLUMNS:
        return gguf.quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
    return quantize_q4_k(values), kind


def rename_prediction(tensors: dict[str, Any], layers: int) -> tuple[dict[str, Any], bool]:
    """Return the tensors with those of a layer for multi-token prediction as a further layer's, and whether there is
    one."""
    around = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head.norm",
    }
    prefix = f"model.layers.{layers}."
    renamed = {}
    for name, values in tensors.items():
        if name.startswith("mtp."):
            part, _, kind = name.removeprefix("mtp.").rpartition(".")
            part = around.get(part, part.removeprefix("layers.0."))
            name = f"{prefix}{part}.{kind}"
        renamed[name] = values
    return renamed, any(name.startswith(prefix) for name in renamed)


def translate(tensors: dict[str, Any], names: Any) -> dict[str, Any]:
    """Return the tensors by the names in the file."""
    translated: dict[str, Any] = {}
    for name, values in tensors.items():
        stem, _, suffix = name.rpartition(".")
        found = names.get_name(stem)
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(enorm|hnorm|eh_proj|shared_head\.norm)", stem):
            found = f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}"
        assert found is not None, name
        translated[found if name.endswith("A_log.") else f"{found}.{suffix}"] = values
    return translated


def prepare(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors as llama.cpp's conversion has them before it translates their names."""
    prepared: dict[str, Any] = {}
    for name, values in stack_experts(tensors).items():
        if name.endswith("_scales"):
            continue
        if name.endswith("_blocks"):
            values, name = repack(values, tensors[name.replace("_blocks", "_scales")]), name.removesuffix("_blocks")
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")) and "mlp.experts" in name:
            values = values.swapaxes(1, 2)
        name = re.sub(r"(experts\.\w+_proj)_bias$", r"\1.bias", name)
        name = re.sub(r"(experts\.\w+_proj|sinks)$", r"\1.weight", name)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("kv_b_proj.weight"):
            heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
            values = values.reshape(heads, plain + config["v_head_dim"], -1)
            prepared[name.replace("kv_b", "k_b")] = np.ascontiguousarray(values[:, :plain].swapaxes(1, 2))
            prepared[name.replace("kv_b", "v_b")] = np.ascontiguousarray(values[:, plain:])
            continue
        if "linear_num_key_heads" in config:
            prepared |= prepare_delta(name, values, config)
            continue
        if name.endswith("conv.conv.weight"):
            values = values[:, 0]
        if "experts.gate_up_proj" in name:
            prepared[name.replace("gate_up", "gate")] = np.ascontiguousarray(values[:, ::2])
            prepared[name.replace("gate_up", "up")] = np.ascontiguousarray(values[:, 1::2])
        else:
            prepared[name] = np.ascontiguousarray(values)
    return prepared


def prepare_delta(name: str, values: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return a tensor of Qwen3-Next or Qwen3.5 in llama.cpp's form."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim, per_key = (
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        value_heads // key_heads,
    )
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith(".A_log"):
        name, values = name + ".", -torch.from_numpy(values).exp().numpy()
    elif "conv1d" in name or name.endswith("shared_expert_gate.weight"):
        values = values.squeeze()
    elif name.endswith("norm.weight") and "linear_attn.norm" not in name:
        values = values + 1
    if "in_proj_qkvz" in name:
        widths = np.cumsum([key_dim, key_dim, per_key * value_dim])
        parts = np.split(values.reshape(key_heads, -1, values.shape[-1]), widths, axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[-1]) for part in parts)
        return {name.replace("qkvz", "qkv"): np.concatenate((q, k, v)), name.replace("qkvz", "z"): z}
    if "model_type" in config and config["model_type"].startswith("qwen3_5") and "linear_attn" in name:
        values = tile_values(name, values, key_heads, per_key, value_dim, 2 * key_heads * key_dim)
    return {name: np.ascontiguousarray(values)}


def tile_values(name: str, values: Any, key_heads: int, per_key: int, value_dim: int, start: int) -> Any:
    """Return the tensor with value heads that share a key head ``key_heads`` apart."""
    width = 1 if any(part in name for part in ("in_proj_b", "in_proj_a", "A_log", "dt_proj")) else value_dim
    order = np.arange(key_heads * per_key * width).reshape(key_heads, per_key, width).swapaxes(0, 1).flatten()
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate((values[:start], values[start:][order]))
    if "out_proj" in name:
        return values[:, order]
    return values if "norm" in name else values[order]


def repack(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return MXFP4 weights ``[experts, out, bytes]`` in ggml's order."""
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*scales.shape, 32)
    halves = codes[..., :16] | (codes[..., 16:] << 4)
    return np.concatenate((scales[..., None], halves), axis=-1).reshape(*scales.shape[:2], -1)


def stack_experts(tensors: dict[str, Floats]) -> dict[str, Floats]:
    """Return the tensors with all experts of a layer in one, ``[experts, out, in]``."""
    stacked: dict[str, Floats] = {}
    experts: dict[str, list[tuple[int, Floats]]] = {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if match is None:
            stacked[name] = values
        else:
            experts.setdefault(match[1] + match[3], []).append((int(match[2]), values))
    return stacked | {
        name: np.stack([values for _, values in sorted(found, key=lambda one: one[0])])
        for name, found in experts.items()
    }


def convert(architecture: str, config: dict[str, Any], name: str, values: Floats) -> Floats:
    """Return the weights as llama.cpp holds them: rows of rotated pairs beside each other, Gemma's norms plus 1."""
    if architecture in PERMUTED and (match := re.search(r"attn_(q|k)\.", name)):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return values + 1
    return values


def write_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(find_width(config))
    writer.add_head_count(config["num_attention_heads"])
    kv_heads = config["num_key_value_heads"]
    is_hybrid = "conv" in (config.get("layer_types") or ())
    if "kv_lora_rank" in config:
        kv_heads = 1
    writer.add_head_count_kv([kv_heads * (kind != "conv") for kind in config["layer_types"]] if is_hybrid else kv_heads)
    writer.add_layer_norm_rms_eps(config.get("norm_eps") or config["rms_norm_eps"])
    if config.get("head_dim") and "kv_lora_rank" not in config:
        writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10_000.0))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    write_own_fields(writer, config, rope.get("full_attention", rope))
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(name):
            add(config[name])


def find_width(config: dict[str, Any]) -> int:
    """Return the width of a feed-forward part, which LFM2's configs give as another number."""
    width: int = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        width = -(-int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple) * multiple
    return width


def write_own_fields(writer: GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """Write what single architectures have."""
    if writer.arch == "olmo2":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "linear_num_key_heads" in config:
        write_delta_fields(writer, config)
    if "kv_lora_rank" in config:
        write_latent_fields(writer, config)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
        if rope.get("attention_factor"):
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if writer.arch == "deepseek2":
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if writer.arch == "mistral3":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    for name, add in (
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if config.get(name):
            add(config[name])


def write_latent_fields(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes of latents, and of the experts of models that have them."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["architectures"] != ["DeepseekV2ForCausalLM"]:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def write_delta_fields(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes of layers with a delta rule."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([1, 1, 1, 0])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def write_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer with GPT-2's splitting."""
    model = tokenizer["model"]
    tokens = [f"[unused{index}]" for index in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, int(gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
