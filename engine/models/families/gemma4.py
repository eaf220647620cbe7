"""Read from a config what Gemma 4 alone has: heads that differ by layer, shared keys, and inputs for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.attention.layer import LayerAttentionConfig
from engine.models.config_fields import UnsupportedField
from engine.models.rope import Rope
from engine.protocol.types import EngineError

FIELDS = frozenset(
    {
        *("hidden_activation", "sliding_window", "layer_types", "attention_bias", "final_logit_softcapping"),
        *("global_head_dim", "num_global_key_value_heads", "per_layer_config", "attention_k_eq_v"),
        *(
            "use_bidirectional_attention",
            "num_kv_shared_layers",
            "use_double_wide_mlp",
            "hidden_size_per_layer_input",
            "vocab_size_per_layer_input",
        ),
        *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
    }
)
DEFAULTS = {
    **{"head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 4, "sliding_window": 512},
    **{"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144},
}
_HEAD_FIELDS = {"head_dim", "num_key_value_heads"}
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """Sizes and switches of Gemma 4."""

    input_size: int
    """Width of the inputs that each layer has from the tokens; 0 if there are none."""
    input_vocab_size: int
    sources: tuple[int | None, ...]
    """For each layer the earlier one whose keys and values it reads; ``None``: its own."""
    keys_are_values: frozenset[int]
    """Layers whose values are the projections of the keys."""
    intermediate: tuple[int, ...]
    """Width of each layer's dense feed-forward part."""

    @property
    def calls(self) -> tuple[int, ...]:
        """For each layer the number of the attention whose keys and values it reads, among those that have their own.

        A layer that shares those of an earlier one calls the same attention again, and no memory holds them twice.
        """
        own = [index for index, source in enumerate(self.sources) if source is None]
        return tuple(own.index(index if source is None else source) for index, source in enumerate(self.sources))


def read_gemma4(fields: dict[str, Any], layers: Sequence[LayerAttentionConfig], types: Sequence[str]) -> Gemma4Config:
    """Read the config. ``layers`` and ``types``: of all layers. Raises ``EngineError`` for numbers that do not fit
    together."""
    if fields.get("use_bidirectional_attention") not in (None, False, "vision"):  # of images, which are not read
        raise UnsupportedField(
            f"use_bidirectional_attention is {fields['use_bidirectional_attention']!r}; only 'vision' is supported"
        )
    num_shared = int(fields.get("num_kv_shared_layers") or 0)
    first_shared = len(types) - num_shared
    if num_shared and (num_shared < 0 or not set(types) <= set(types[: max(first_shared, 0)])):
        raise EngineError(f"num_kv_shared_layers is {num_shared}; an earlier layer of each kind must have its own keys")
    sources = [
        None if index < first_shared else max(other for other in range(first_shared) if types[other] == kind)
        for index, kind in enumerate(types)
    ]
    for index, source in enumerate(sources):
        if source is not None and layers[index] != layers[source]:
            raise UnsupportedField(f"layer {index} has other heads than layer {source}, whose keys it reads")
    wide = bool(fields.get("use_double_wide_mlp"))
    input_size, input_vocab = int(fields["hidden_size_per_layer_input"] or 0), int(fields["vocab_size_per_layer_input"])
    if input_size and input_vocab < int(fields["vocab_size"]):
        raise UnsupportedField(f"vocab_size_per_layer_input is {input_vocab}, less than vocab_size")
    keys_are_values = bool(fields.get("attention_k_eq_v"))
    return Gemma4Config(
        input_size=input_size,
        input_vocab_size=input_vocab,
        sources=tuple(sources),
        keys_are_values=frozenset(
            index for index, kind in enumerate(types) if keys_are_values and kind == "full_attention"
        ),
        intermediate=tuple(
            int(fields["intermediate_size"]) * (2 if wide and source is not None else 1) for source in sources
        ),
    )


def change_heads(
    fields: dict[str, Any], layers: Sequence[LayerAttentionConfig], types: Sequence[str]
) -> tuple[LayerAttentionConfig, ...]:
    """Return the layers' attention with the heads that each of them has."""
    overrides = fields.get("per_layer_config")
    if overrides is None:
        own: dict[str, Any] = {"head_dim": fields["global_head_dim"]}
        kv_heads = fields.get("num_global_key_value_heads")
        if fields.get("attention_k_eq_v") and kv_heads is not None:
            own["num_key_value_heads"] = kv_heads
        overrides = {index: own for index, kind in enumerate(types) if kind == "full_attention"}
    changed = list(layers)
    for key, own in overrides.items():
        if not 0 <= int(key) < len(changed):
            raise EngineError(f"per_layer_config has a layer {key} of {len(changed)}")
        if unknown := own.keys() - _HEAD_FIELDS:
            raise UnsupportedField(f"per_layer_config has {', '.join(sorted(unknown))}, which is not supported")
        layer = changed[int(key)]
        head_dim, kv_heads = int(own.get("head_dim") or layer.head_dim), own.get("num_key_value_heads")
        kv_heads = int(kv_heads or layer.kv_heads)
        if min(head_dim, kv_heads) < 1 or layer.heads % kv_heads or head_dim % 2:
            raise EngineError(f"{layer.heads} heads of {head_dim} on {kv_heads} key-value heads are no decoder's shape")
        changed[int(key)] = replace(layer, head_dim=head_dim, kv_heads=kv_heads)
    return tuple(changed)


def read_gemma4_ropes(
    fields: dict[str, Any], layers: Sequence[LayerAttentionConfig], types: Sequence[str]
) -> tuple[Rope, ...]:
    """Return each layer's rotary embedding. A proportional one rotates a part of the pairs of a whole head."""
    made: dict[tuple[str, int], Rope] = {}
    for layer, kind in zip(layers, types, strict=True):
        settings = dict((fields.get("rope_parameters") or _ROPES).get(kind) or {})
        form = settings.pop("rope_type", "default")
        allowed = {"rope_theta"} | ({"partial_rotary_factor", "factor"} if form == "proportional" else set())
        if form not in ("default", "proportional") or settings.keys() - allowed:
            raise UnsupportedField(f"rope_parameters of {kind} are {settings}, of rope_type {form!r}: not supported")
        settings["rope_theta"] = float(settings.get("rope_theta", _ROPES[kind]["rope_theta"]))
        made.setdefault((kind, layer.head_dim), Rope(form, layer.head_dim, settings))
    return tuple(made[kind, layer.head_dim] for layer, kind in zip(layers, types, strict=True))
