"""Fields of ``config.json`` of Gemma 4, from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.gguf.fields.own import read_layer_types
from engine.gguf.metadata import Metadata
from engine.protocol.types import EngineError


def read_gemma4_fields(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that Gemma 4 has besides those of all, which ``fields`` are.

    Raises ``EngineError`` for what no config can say.
    """
    num_layers = fields["num_hidden_layers"]
    dims = {suffix: int(metadata.require(f"attention.key_length{suffix}")) for suffix in ("", "_swa")}
    for suffix, dim in dims.items():
        metadata.expect(f"attention.value_length{suffix}", dim)
    metadata.expect("attention.scale", 0.0, 1.0)
    types = read_layer_types(metadata, num_layers)
    shared = int(metadata.get("attention.shared_kv_layers", 0))
    first_shared = num_layers - shared
    input_size = int(metadata.get("embedding_length_per_layer_input", 0))
    result = {
        "head_dim": dims["_swa"],
        "global_head_dim": dims[""],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": int(metadata.require("attention.sliding_window")),
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "final_logit_softcapping": metadata.get_cap("final_logit_softcapping", 0.0),
        "hidden_size_per_layer_input": input_size,
    }
    if input_size:
        table = metadata.model.tensors.get("per_layer_token_embd.weight")
        if table is None:
            raise EngineError(f"{metadata.model.paths[0]} lacks the tensor 'per_layer_token_embd.weight'")
        result["vocab_size_per_layer_input"] = table.shape[0]
    result |= _read_kv_heads(metadata, types[:first_shared])
    return result | _read_widths(metadata, num_layers, first_shared) | _read_experts(metadata)


def _read_kv_heads(metadata: Metadata, types: list[str]) -> dict[str, Any]:
    """Return the fields of key-value heads. ``types``: of the layers that have keys of their own."""
    numbers = np.atleast_1d(metadata.require("attention.head_count_kv"))
    if len(numbers) == 1:
        numbers = numbers.repeat(len(types))
    by_type: dict[str, set[int]] = {}
    for kind, number in zip(types, numbers, strict=False):
        by_type.setdefault(kind, set()).add(int(number))
    if len(numbers) < len(types) or any(len(found) > 1 for found in by_type.values()):
        raise metadata.refuse("attention.head_count_kv", numbers.tolist(), "one number for each kind of layer")
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    without_values = [index for index in full if f"blk.{index}.attn_v.weight" not in metadata.model.tensors]
    if without_values and without_values != full:
        raise EngineError(
            f"{metadata.model.paths[0]} has values in some of its layers that see all tokens and not in others"
        )
    of_full, of_sliding = (next(iter(by_type.get(kind, {0}))) for kind in ("full_attention", "sliding_attention"))
    if not without_values and of_full and of_sliding and of_full != of_sliding:
        raise metadata.refuse("attention.head_count_kv", numbers.tolist(), "the same in all layers with values")
    return {
        "attention_k_eq_v": bool(without_values),
        "num_key_value_heads": of_sliding or of_full,
        "num_global_key_value_heads": of_full if without_values else None,
    }


def _read_widths(metadata: Metadata, num_layers: int, first_shared: int) -> dict[str, Any]:
    widths = np.broadcast_to(metadata.require("feed_forward_length"), num_layers)
    width = int(widths[0])
    is_double = first_shared < num_layers and bool((widths[first_shared:] == 2 * width).all())
    if not (widths[: first_shared if is_double else None] == width).all():
        raise metadata.refuse("feed_forward_length", widths.tolist(), "one number, or twice it in layers without keys")
    return {"intermediate_size": width, "use_double_wide_mlp": is_double}


def _read_experts(metadata: Metadata) -> dict[str, Any]:
    experts = int(metadata.get("expert_count", 0))
    if not experts:
        metadata.ignore("expert_used_count", "expert_feed_forward_length")
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": int(metadata.require("expert_used_count")),
        "moe_intermediate_size": int(metadata.require("expert_feed_forward_length")),
    }
