"""Read from a config the attention and the experts beside layers with Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.attention.layer import LayerAttentionConfig
from engine.models.families.config import ExpertsConfig
from engine.models.families.experts import read_grouped_routing, read_per_token
from engine.models.families.layers import read_attention
from engine.models.families.mamba import EXPERTS, MambaConfig
from engine.models.families.table import Family
from engine.models.rope import NO_ROPE, Rope, read_rope
from engine.models.routing import RoutingConfig


def read_mamba_attention(
    prefix: str, family: Family, fields: dict[str, Any], mamba: MambaConfig
) -> tuple[LayerAttentionConfig, ...]:
    """Return the attention of each layer that has it."""
    if not mamba.num_attention_layers:
        return ()
    layer, *_ = read_attention(prefix, family, fields | {"num_hidden_layers": len(mamba.kinds)})
    if prefix == "FalconH1":
        # Queries and keys are scaled with their input; where that scales the values, ``attention_factor`` has it.
        taken = float(fields["attention_in_multiplier"])
        layer = replace(layer, scale=layer.scale * taken**2 * float(fields["key_multiplier"]))
    return (layer,) * mamba.num_attention_layers


def read_mamba_ropes(
    prefix: str, family: Family, fields: dict[str, Any], attention: Sequence[LayerAttentionConfig]
) -> tuple[Rope, ...]:
    """Return the rotary embedding of each layer with attention."""
    if not attention:
        return ()
    head_dim = attention[0].head_dim
    if prefix == "NemotronH" or (prefix == "GraniteMoeHybrid" and fields.get("position_embedding_type") != "rope"):
        return (Rope(NO_ROPE, head_dim, {}),) * len(attention)
    if prefix == "Bamba":  # whatever the config says, as in transformers
        fields = fields | {"partial_rotary_factor": 0.5}
    return (read_rope(fields, head_dim, theta=family.rope_theta, partial=prefix == "Bamba"),) * len(attention)


def read_mamba_experts(prefix: str, fields: dict[str, Any], mamba: MambaConfig) -> ExpertsConfig | None:
    """Return the experts of Granite 4 or Nemotron-H; ``None`` if the model has none."""
    num_layers = len(mamba.kinds)
    if prefix == "GraniteMoeHybrid" and int(fields["num_local_experts"]):
        num_experts = int(fields["num_local_experts"])
        return ExpertsConfig(
            layers=frozenset(range(num_layers)),
            num_experts=num_experts,
            routing=RoutingConfig(read_per_token(fields, num_experts), is_normalized=True),
            intermediate=int(fields["intermediate_size"]),
            router="block_sparse_moe",
            names=("", "", ""),  # all experts are in one tensor
        )
    if prefix != "NemotronH" or EXPERTS not in mamba.kinds:
        return None
    num_experts = int(fields["n_routed_experts"])
    return ExpertsConfig(
        layers=frozenset(index for index, kind in enumerate(mamba.kinds) if kind == EXPERTS),
        num_experts=num_experts,
        routing=read_grouped_routing(prefix, fields, num_experts),
        intermediate=int(fields["moe_intermediate_size"]),
        router="mixer",
        names=("", "up_proj", "down_proj"),
        shared_intermediate=int(fields["moe_shared_expert_intermediate_size"]),
        shared_name="shared_experts",
        has_shared_gate=False,
        has_correction=True,
        latent=None if fields.get("moe_latent_size") is None else int(fields["moe_latent_size"]),
    )
