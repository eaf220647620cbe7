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
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

Floats = npt.NDArray[np.float32]
F32 = GGMLQuantizationType.F32


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
    write_config(writer, config)
    write_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), config["vocab_size"])
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    for name, values in stack_experts(load_file(checkpoint / "model.safetensors")).items():
        stem, _, suffix = name.rpartition(".")
        translated = names.get_name(stem)
        assert translated is not None, name
        tensor = convert(architecture, config, translated, values.astype(np.float32))
        if tensor.ndim > 1 and kind != F32:
            writer.add_tensor(f"{translated}.{suffix}", gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{translated}.{suffix}", tensor)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    if architecture == "llama" and name.endswith(("attn_q", "attn_k")):
        heads = config["num_attention_heads" if name.endswith("q") else "num_key_value_heads"]
        return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm"):
        return values + 1
    return values


def write_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10_000.0))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(name):
            add(config[name])


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
