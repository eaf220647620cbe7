"""Fields of ``config.json`` of Qwen3-Next and Qwen3.5, from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from engine.gguf.metadata import Metadata
from engine.protocol.types import EngineError

ARCHITECTURES = "qwen3next", "qwen35", "qwen35moe"


def read_delta_fields(metadata: Metadata, num_layers: int, head_dim: int) -> dict[str, Any]:
    """Return the fields of layers with a delta rule, of experts and of positions.

    Raises ``EngineError`` for sizes that do not fit together.
    """
    value_heads, inner = int(metadata.require("ssm.time_step_rank")), int(metadata.require("ssm.inner_size"))
    if value_heads < 1 or inner % value_heads:
        raise EngineError(
            f"{metadata.model.paths[0]}: {value_heads} value heads (ssm.time_step_rank) do not divide "
            f"ssm.inner_size, {inner}"
        )
    interval = int(metadata.get("full_attention_interval", 4))
    if interval < 1:
        raise metadata.refuse("full_attention_interval", interval, "at least 1")
    metadata.get("rope.dimension_sections")  # of images: the three positions of a text's token are the same
    fields = {
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
        "linear_num_key_heads": int(metadata.require("ssm.group_count")),
        "linear_key_head_dim": int(metadata.require("ssm.state_size")),
        "linear_conv_kernel_dim": int(metadata.require("ssm.conv_kernel")),
        "layer_types": [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
        ],
        "partial_rotary_factor": int(metadata.require("rope.dimension_count")) / head_dim,
    }
    if metadata.architecture == "qwen35":
        return fields
    metadata.expect("expert_weights_norm", True)
    return fields | {
        "num_experts": int(metadata.require("expert_count")),
        "num_experts_per_tok": int(metadata.require("expert_used_count")),
        "moe_intermediate_size": int(metadata.require("expert_feed_forward_length")),
        "shared_expert_intermediate_size": int(metadata.require("expert_shared_feed_forward_length")),
        "norm_topk_prob": True,
    }
