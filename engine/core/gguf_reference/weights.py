"""The weights of a GGUF file by transformers' names and in its order, from those that our decoders have taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def arrange_weights(architecture: str, config: Any, taken: Tensors) -> Tensors:
    """Return the weights as a checkpoint has them. ``config``: transformers'."""
    arranged = {}
    for name, tensor in taken.items():
        if name.endswith(".A"):  # the checkpoint has the logarithm
            name, tensor = f"{name}_log", (-tensor.double()).log()
        arranged[name] = tensor
    arrange: Callable[[Tensors, Any], Tensors] | None = {
        "gpt-oss": _arrange_gpt_oss,
        "deepseek2": _arrange_deepseek,
        "qwen3next": _arrange_qwen3_next,
        **dict.fromkeys(("qwen35", "qwen35moe"), _arrange_qwen3_5),
        "gemma4": _arrange_gemma4,
        "granitehybrid": _arrange_granite,
        **dict.fromkeys(("nemotron_h", "nemotron_h_moe", "mamba2"), _arrange_single_parts),
    }.get(architecture)
    return arranged if arrange is None else arrange(arranged, config)


def _stack_experts(tensors: Tensors) -> tuple[Tensors, dict[str, Tensor]]:
    """Return the other tensors, and those of all experts ``[experts, out, in]`` by their common name."""
    others: Tensors = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            others[name] = tensor
    return others, {name: torch.stack([own for _, own in sorted(one.items())]) for name, one in experts.items()}


def _arrange_gpt_oss(tensors: Tensors, _: Any) -> Tensors:
    """The rows of gate and up alternate, and matrices are ``[in, out]``."""
    others, experts = _stack_experts(tensors)
    for name, gates in experts.items():
        if name.endswith("gate_proj"):
            stem = name.removesuffix("gate_proj")
            rows = torch.stack((gates, experts[f"{stem}up_proj"]), dim=2).flatten(1, 2)
            biases = [others.pop(f"{stem}{part}_proj.bias") for part in ("gate", "up")]
            others[f"{stem}gate_up_proj"] = rows.transpose(1, 2).contiguous()
            others[f"{stem}gate_up_proj_bias"] = torch.stack(biases, dim=2).flatten(1)
            others[f"{stem}down_proj"] = experts[f"{stem}down_proj"].transpose(1, 2).contiguous()
            others[f"{stem}down_proj_bias"] = others.pop(f"{stem}down_proj.bias")
    return others


def _arrange_deepseek(tensors: Tensors, _: Any) -> Tensors:
    """The matrices that make keys and values of latents are one."""
    arranged = dict(tensors)
    for name, to_keys in tensors.items():
        if name.endswith("k_b_proj.weight"):
            stem = name.removesuffix("k_b_proj.weight")
            values = arranged.pop(f"{stem}v_b_proj.weight")
            del arranged[name]
            arranged[f"{stem}kv_b_proj.weight"] = torch.cat((to_keys.transpose(1, 2), values), dim=1).flatten(0, 1)
    return arranged


def _arrange_qwen3_next(tensors: Tensors, config: Any) -> Tensors:
    """Queries, keys, values and gates of a key head are together."""
    arranged = dict(tensors)
    heads, width = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    for name, rows in tensors.items():
        if name.endswith("in_proj_qkv.weight"):
            stem = name.removesuffix("in_proj_qkv.weight")
            gates = arranged.pop(f"{stem}in_proj_z.weight")
            del arranged[name]
            parts = [*torch.split(rows, [width, width, len(rows) - 2 * width]), gates]
            by_head = [part.reshape(heads, -1, part.shape[-1]) for part in parts]
            arranged[f"{stem}in_proj_qkvz.weight"] = torch.cat(by_head, dim=1).flatten(0, 1)
    return arranged


def _arrange_qwen3_5(tensors: Tensors, config: Any) -> Tensors:
    """Value heads that share a key head are beside each other."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys = 2 * key_heads * config.linear_key_head_dim

    def gather(rows: Tensor) -> Tensor:
        apart = rows.reshape(value_heads // key_heads, key_heads, len(rows) // value_heads, *rows.shape[1:])
        return apart.transpose(0, 1).reshape(rows.shape)

    arranged = dict(tensors)
    for name, tensor in tensors.items():
        part = name.partition("linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            arranged[name] = torch.cat((tensor[:keys], gather(tensor[keys:])))
        elif part == "out_proj.weight":
            arranged[name] = gather(tensor.T).T.contiguous()
        elif part and part != "norm.weight":
            arranged[name] = gather(tensor)
    return arranged


def _arrange_gemma4(tensors: Tensors, _: Any) -> Tensors:
    others, experts = _stack_experts(tensors)
    return others | experts


def _arrange_granite(tensors: Tensors, _: Any) -> Tensors:
    """The rows of gate and up are one below the other."""
    others, experts = _stack_experts(tensors)
    arranged = dict(others)
    for name, gate in others.items():
        if name.endswith("shared_mlp.gate_proj.weight"):
            stem = name.removesuffix("gate_proj.weight")
            del arranged[name]
            arranged[f"{stem}input_linear.weight"] = torch.cat((gate, arranged.pop(f"{stem}up_proj.weight")))
    for name, gates in experts.items():
        if name.endswith("experts.gate_proj"):
            stem = name.removesuffix("experts.gate_proj")
            arranged[f"{stem}input_linear.weight"] = torch.cat((gates, experts[f"{stem}experts.up_proj"]), dim=1)
            arranged[f"{stem}output_linear.weight"] = experts[f"{stem}experts.down_proj"]
    return arranged


def _arrange_single_parts(tensors: Tensors, _: Any) -> Tensors:
    beginnings = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f."}
    arranged = {}
    for name, tensor in tensors.items():
        old = next((old for old in beginnings if name.startswith(old)), "model.")
        new = beginnings.get(old, "backbone.")
        arranged[new + name.removeprefix(old) if name.startswith(old) else name] = tensor
    return arranged
