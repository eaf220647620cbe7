"""Fields of ``config.json`` of Mamba-2, Falcon-H1, Granite 4 and Nemotron-H, from the metadata of a GGUF file.

Neither a range of step sizes nor, in Falcon-H1, a factor is in a file: the former is the architecture's own, the latter
are multiplied into the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.gguf.fields.own import read_multipliers
from engine.gguf.metadata import Metadata
from engine.protocol.types import EngineError

NEMOTRON = "nemotron_h", "nemotron_h_moe"
SINGLE_PART = "mamba2", *NEMOTRON
"""Architectures whose layers are one part alone."""
ARCHITECTURES = "falcon-h1", "granitehybrid", *SINGLE_PART
_SIZES = "heads", "head_dim", "state_size", "groups", "width", "convolution_bias", "bias"
_GRANITE_NAMES = (
    *("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    *("mamba_conv_bias", "mamba_proj_bias"),
)
_NEMOTRON_NAMES = (
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias", "use_bias"),
)
_NAMES = {
    "mamba2": ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "use_conv_bias", "use_bias"),
    **dict.fromkeys(("falcon-h1", "granitehybrid"), _GRANITE_NAMES),
    **dict.fromkeys(NEMOTRON, _NEMOTRON_NAMES),
}
"""Names of ``_SIZES`` in a config."""
_SIGMOID = 2
_FALCON_FACTORS = {
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "ssm_in_multiplier"), 1.0),
    **dict.fromkeys(("ssm_out_multiplier", "attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **{"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2},
}


def read_mamba_fields(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that such an architecture has besides those of all, which ``fields`` are.

    Raises ``EngineError`` for sizes that do not fit together.
    """
    architecture = metadata.architecture
    heads, inner = int(metadata.require("ssm.time_step_rank")), int(metadata.require("ssm.inner_size"))
    if heads < 1 or inner % heads:
        raise EngineError(
            f"{metadata.model.paths[0]}: {heads} heads (ssm.time_step_rank) do not divide ssm.inner_size, {inner}"
        )
    sizes = (
        *(heads, inner // heads, int(metadata.require("ssm.state_size")), int(metadata.get("ssm.group_count", 1))),
        *(
            int(metadata.require("ssm.conv_kernel")),
            _has_tensor(metadata, "ssm_conv1d.bias"),
            _has_tensor(metadata, "ssm_in.bias"),
        ),
    )
    own = dict(zip(_NAMES[architecture], sizes, strict=True))
    match architecture:
        case "mamba2":
            metadata.ignore("feed_forward_length", "attention.head_count")
            eps = {"layer_norm_epsilon": fields["rms_norm_eps"]}
            return own | eps | {"expand": _find_ratio(metadata, inner, fields["hidden_size"])}
        case "falcon-h1":
            has_norm = {"mamba_rms_norm": _has_tensor(metadata, "ssm_norm.weight"), "mamba_norm_before_gate": False}
            widths = {"mamba_d_ssm": inner, "intermediate_size": metadata.get_uniform("feed_forward_length")}
            return own | has_norm | widths | _FALCON_FACTORS
        case "granitehybrid":
            ratio = {"mamba_expand": _find_ratio(metadata, inner, fields["hidden_size"])}
            return own | ratio | _read_granite_fields(metadata, fields)
        case _:
            return own | _read_nemotron_fields(metadata, fields)


def has_rope(metadata: Metadata) -> bool:
    """Return True if queries and keys are rotated."""
    if metadata.architecture == "granitehybrid":  # where this is all that tells
        return bool(metadata.get("rope.scaling.finetuned", False))
    return metadata.architecture == "falcon-h1"


def _read_granite_fields(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    num_layers, experts = fields["num_hidden_layers"], int(metadata.get("expert_count", 0))
    kv_heads = _read_by_layer(metadata, "attention.head_count_kv", num_layers)
    width = metadata.get_uniform("feed_forward_length")
    shared = int(metadata.get("expert_shared_feed_forward_length", 0 if experts else width))
    if shared < 1:
        raise metadata.refuse("expert_shared_feed_forward_length", shared, "at least 1")
    result = {
        "layer_types": ["attention" if one else "mamba" for one in kv_heads],
        "attention_bias": _has_tensor(metadata, "attn_q.bias"),
        "position_embedding_type": "rope" if has_rope(metadata) else "nope",
        "intermediate_size": width,
        "shared_intermediate_size": shared,
        "num_local_experts": experts,
    }
    if experts:
        metadata.expect("expert_feed_forward_length", width)
        result["num_experts_per_tok"] = int(metadata.require("expert_used_count"))
    else:
        metadata.ignore("expert_used_count")
    return result | read_multipliers(metadata)


def _read_nemotron_fields(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    num_layers, has_experts = fields["num_hidden_layers"], metadata.architecture == "nemotron_h_moe"
    kv_heads = _read_by_layer(metadata, "attention.head_count_kv", num_layers)
    widths = _read_by_layer(metadata, "feed_forward_length", num_layers)
    found = sorted(set(widths) - {0})
    if len(found) > 1:
        raise metadata.refuse("feed_forward_length", found, "0 and one other number")
    without_keys = [("moe" if has_experts else "mlp") if width else "linear_attention" for width in widths]
    result = {
        "layers_block_type": [
            "full_attention" if kv else kind for kv, kind in zip(kv_heads, without_keys, strict=True)
        ],
        "layer_norm_epsilon": fields["rms_norm_eps"],
        "attention_bias": _has_tensor(metadata, "attn_q.bias"),
        "mlp_bias": _has_tensor(metadata, "ffn_up.bias") or _has_tensor(metadata, "ffn_up_shexp.bias"),
        "intermediate_size": found[0] if found else 1,
    }
    return result | _read_nemotron_experts(metadata) if has_experts else result


def _read_nemotron_experts(metadata: Metadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", _SIGMOID)
    groups = int(metadata.get("expert_group_count") or 1)
    width = metadata.get_uniform("expert_feed_forward_length")
    shared = int(metadata.get("expert_shared_feed_forward_length", 0))
    if shared < 1:
        raise metadata.refuse("expert_shared_feed_forward_length", shared, "at least 1")
    return {
        "n_routed_experts": int(metadata.require("expert_count")),
        "num_experts_per_tok": metadata.get_uniform("expert_used_count"),
        "n_shared_experts": int(metadata.get("expert_shared_count", 1)),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": int(metadata.get("moe_latent_size", 0)) or None,
        "routed_scaling_factor": metadata.get_number("expert_weights_scale", 1.0, is_zero_unset=True),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": int(metadata.require("expert_group_used_count")) if groups > 1 else 1,
    }


def _read_by_layer(metadata: Metadata, name: str, num_layers: int) -> list[int]:
    """Return a number for each layer; a file may have further layers, which predict several tokens."""
    numbers = np.atleast_1d(metadata.require(name))
    if len(numbers) == 1:
        numbers = np.broadcast_to(numbers, num_layers)
    if len(numbers) < num_layers:
        raise metadata.refuse(name, numbers.tolist(), f"a number, or {num_layers} of them")
    return [int(number) for number in numbers[:num_layers]]


def _find_ratio(metadata: Metadata, inner: int, hidden: int) -> int:
    if inner % hidden:
        raise metadata.refuse("ssm.inner_size", inner, f"a multiple of embedding_length, {hidden}")
    return inner // hidden


def _has_tensor(metadata: Metadata, part: str) -> bool:
    """Return True if any layer has a tensor of this name."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in metadata.model.tensors)
