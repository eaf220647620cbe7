"""Fields of a Hugging Face ``config.json`` that single architectures have, from a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.gguf.metadata import Metadata
from engine.protocol.types import EngineError

_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "olmo2": 4, "gpt-oss": 2}
"""Every layer but each n-th has a sliding window."""
_LAYERS_WITHOUT_KEYS = "lfm2", "granitehybrid", "nemotron_h", "nemotron_h_moe"
_MULTIPLIERS = {
    **{"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"},
    **{"attention_multiplier": "attention.scale", "logits_scaling": "logit_scale"},
}
"""Granite's factors by their names in the metadata."""


def read_own_fields(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of windows, factors and kinds of layers; ``None`` for an architecture without its own.

    ``fields``: those that are known already.
    """
    num_layers = fields["num_hidden_layers"]
    match metadata.architecture:
        case "granite":
            return read_multipliers(metadata)
        case "olmo2":
            if "attention.sliding_window" not in metadata:
                raise EngineError(
                    f"{metadata.model.paths[0]} is an OLMo 2, which is not supported as a GGUF file; OLMo 3 is, which "
                    "has olmo2.attention.sliding_window"
                )
            return _window_fields(metadata, num_layers)
        case "gpt-oss":
            return _window_fields(metadata, num_layers) | {"attention_bias": True}
        case "lfm2":
            has_keys = np.broadcast_to(metadata.require("attention.head_count_kv"), num_layers) > 0
            return {
                "layer_types": ["full_attention" if one else "conv" for one in has_keys],
                "conv_L_cache": int(metadata.require("shortconv.l_cache")),
                "block_auto_adjust_ff_dim": False,
                "norm_eps": fields["rms_norm_eps"],
            }
    return None


def read_multipliers(metadata: Metadata) -> dict[str, float]:
    """Return Granite's factors."""
    return {name: metadata.get_number(key, 1.0, is_zero_unset=True) for name, key in _MULTIPLIERS.items()}


def read_kv_heads(metadata: Metadata, heads: int) -> int:
    """Return the number of key-value heads, which layers without attention have none of."""
    if metadata.architecture not in _LAYERS_WITHOUT_KEYS:
        return metadata.get_uniform("attention.head_count_kv", heads)
    numbers = np.unique(metadata.require("attention.head_count_kv"))
    if len(numbers) != 2 or numbers[0] != 0:
        raise metadata.refuse("attention.head_count_kv", numbers.tolist(), "0 and one other number")
    return int(numbers[1])


def _window_fields(metadata: Metadata, num_layers: int) -> dict[str, Any]:
    window = int(metadata.require("attention.sliding_window"))
    return {"sliding_window": window, "layer_types": read_layer_types(metadata, num_layers)}


def read_layer_types(metadata: Metadata, num_layers: int) -> list[str]:
    """Return which layers have a sliding window: all but every n-th, or as the file says for each."""
    pattern = np.asarray(metadata.get("attention.sliding_window_pattern", _PERIODS[metadata.architecture]))
    if pattern.ndim == 0:
        period = int(pattern)
        slides = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    elif len(pattern) == num_layers:
        slides = [bool(value) for value in pattern]
    else:
        raise metadata.refuse(
            "attention.sliding_window_pattern", pattern.tolist(), f"a number, or {num_layers} of them"
        )
    return ["sliding_attention" if one else "full_attention" for one in slides]
