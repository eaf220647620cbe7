"""Read from a config the mixture of experts of an architecture that has one."""

from __future__ import annotations

from typing import Any

from engine.models.config_fields import UnsupportedField
from engine.models.families.config import Clamp, ExpertsConfig
from engine.models.routing import RoutingConfig
from engine.protocol.types import EngineError

_NAMES = "gate_proj", "up_proj", "down_proj"


def read_experts(prefix: str, fields: dict[str, Any], num_layers: int) -> ExpertsConfig | None:
    """Return the experts of an architecture; ``None`` if it has none. Raises ``EngineError`` for impossible sizes."""
    clamp = None
    if prefix == "Mixtral":
        sparse_layers = list(range(num_layers))
        router, names, intermediate = "block_sparse_moe", ("w1", "w3", "w2"), fields["intermediate_size"]
    elif prefix == "GptOss":
        sparse_layers, router, names = list(range(num_layers)), "mlp", ("", "", "")  # all experts are in one tensor
        intermediate = fields["intermediate_size"]
        clamp = Clamp(float(fields["swiglu_alpha"]), float(fields["swiglu_limit"]))
        if not clamp.limit > 0:
            raise EngineError(f"swiglu_limit is {clamp.limit}; it must be more than 0")
    elif prefix == "Gemma4" and fields.get("enable_moe_block"):
        sparse_layers, router, names = list(range(num_layers)), "router", ("", "", "")
        intermediate = fields["moe_intermediate_size"]
        fields = fields | {"num_experts_per_tok": fields["top_k_experts"]}
    elif prefix in ("Qwen3Moe", "Qwen3Next", "Qwen3_5Moe"):
        dense, step = set(fields.get("mlp_only_layers") or ()), int(fields.get("decoder_sparse_step", 1))
        sparse_layers = [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]
        router, names, intermediate = "mlp", _NAMES, fields["moe_intermediate_size"]
    else:
        return None
    num_experts = int(fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"])
    is_normalized = prefix in ("Mixtral", "GptOss", "Gemma4") or bool(
        fields.get("norm_topk_prob", prefix != "Qwen3Moe")
    )
    return ExpertsConfig(
        layers=frozenset(sparse_layers),
        num_experts=num_experts,
        routing=RoutingConfig(read_per_token(fields, num_experts), is_normalized),
        intermediate=int(intermediate),
        router=router,
        names=names,
        shared_intermediate=int(fields.get("shared_expert_intermediate_size") or 0),
        clamp=clamp,
    )


def read_grouped_experts(prefix: str, fields: dict[str, Any], num_layers: int) -> ExpertsConfig:
    """Return the experts of a DeepSeek-V2 or V3, or of a model built like them, with experts that every token is
    routed to. Raises ``EngineError`` for impossible sizes."""
    num_experts, intermediate = int(fields["n_routed_experts"]), int(fields["moe_intermediate_size"])
    return ExpertsConfig(
        layers=_find_sparse_layers(fields, num_layers),
        num_experts=num_experts,
        routing=read_grouped_routing(prefix, fields, num_experts),
        intermediate=intermediate,
        router="mlp",
        names=_NAMES,
        shared_intermediate=int(fields["n_shared_experts"] or 0) * intermediate,
        shared_name="shared_experts",
        has_shared_gate=False,
        has_correction=prefix != "DeepseekV2",
    )


def _find_sparse_layers(fields: dict[str, Any], num_layers: int) -> frozenset[int]:
    types = fields.get("mlp_layer_types")
    if types is None:
        return frozenset(range(int(fields["first_k_dense_replace"]), num_layers))
    if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        raise EngineError(f"mlp_layer_types must be {num_layers} of 'dense' and 'sparse', but is {types}")
    return frozenset(index for index, kind in enumerate(types) if kind == "sparse")


def read_grouped_routing(prefix: str, fields: dict[str, Any], num_experts: int) -> RoutingConfig:
    """Return the routing to experts in groups. Raises ``EngineError`` for impossible sizes."""
    is_second = prefix == "DeepseekV2"
    method = fields.get("topk_method") or ("greedy" if is_second else "noaux_tc")
    if method not in (("greedy", "group_limited_greedy") if is_second else ("noaux_tc",)):
        raise UnsupportedField(f"topk_method {method!r} is not supported for this architecture")
    function = "softmax" if is_second else "sigmoid"
    if fields.get("scoring_func", function) != function:
        raise UnsupportedField(f"scoring_func {fields['scoring_func']!r} is not supported; supported is {function!r}")
    groups = 1 if method == "greedy" else int(fields["n_group"] or 1)
    chosen = 1 if method == "greedy" else int(fields["topk_group"] or 1)
    least = 1 if is_second else 2
    if not 1 <= chosen <= groups or num_experts % groups or num_experts // groups < least:
        raise EngineError(f"{num_experts} experts in {groups} groups, of which a token has {chosen}, are no router's")
    return RoutingConfig(
        per_token=read_per_token(fields, num_experts // groups * chosen),
        is_normalized=not is_second and bool(fields["norm_topk_prob"]),
        score="softmax" if is_second else "sigmoid",
        num_groups=groups,
        groups_per_token=chosen,
        scale=float(fields["routed_scaling_factor"]),
    )


def read_per_token(fields: dict[str, Any], num_experts: int) -> int:
    """Return the number of a token's experts."""
    per_token = fields["num_experts_per_tok"]
    if not isinstance(per_token, int) or not 1 <= per_token <= num_experts:
        raise EngineError(f"num_experts_per_tok is {per_token}; it must be 1 to the number of experts, {num_experts}")
    return per_token
