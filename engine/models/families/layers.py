"""Read from a config what differs between layers: attention, windows, rotary embeddings, layers without attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.attention.layer import LayerAttentionConfig
from engine.models.config_fields import UnsupportedField
from engine.models.families.gemma4 import change_heads, read_gemma4_ropes
from engine.models.families.table import Family
from engine.models.latent_config import LatentConfig
from engine.models.rope import NO_ROPE, Rope, read_rope, read_ropes_by_layer_type
from engine.protocol.types import EngineError

_FULL, _SLIDING, _LINEAR, _CONVOLUTION = "full_attention", "sliding_attention", "linear_attention", "conv"
_SECTIONS = "mrope_section", "mrope_interleaved"
_QUERY_SCALING = "llama_4_scaling_beta"


def read_attention(prefix: str, family: Family, fields: dict[str, Any]) -> tuple[LayerAttentionConfig, ...]:
    num_layers, heads = int(fields["num_hidden_layers"]), int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    head_dim = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
    if min(num_layers, int(fields["hidden_size"]), heads, kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise EngineError(
            f"{num_layers} layers of {heads} heads of {head_dim} on {kv_heads} key-value heads are no decoder's shape"
        )
    window = _read_window(prefix, family, fields)
    has_scale = "query_pre_attn_scalar" in family.extra_fields
    scale = float(fields["query_pre_attn_scalar"] if has_scale else head_dim) ** -0.5
    if prefix == "Gemma4":
        scale = 1.0
    if "attention_multiplier" in family.extra_fields:
        scale = read_multiplier(fields, "attention_multiplier")
    softcap = read_softcap(fields, "attn_logit_softcapping")
    full = LayerAttentionConfig(heads, kv_heads, head_dim, scale, softcap=softcap)
    sliding = replace(full, window=window)
    if family.delta is not None or family.has_convolutions or family.mamba is not None:
        return (full,) * num_layers
    types = _read_layer_types(prefix, family, fields=fields, num_layers=num_layers, window=window)
    layers = tuple(sliding if kind == _SLIDING else full for kind in types)
    return change_heads(fields, layers, types) if prefix == "Gemma4" else layers


def list_types(attention: Sequence[LayerAttentionConfig]) -> list[str]:
    """Return transformers' names for the layers' types."""
    return [_FULL if layer.window is None else _SLIDING for layer in attention]


def read_ropes(
    prefix: str, family: Family, fields: dict[str, Any], attention: tuple[LayerAttentionConfig, ...]
) -> tuple[Rope, ...]:
    head_dim = attention[0].head_dim
    if prefix == "Gemma4":
        return read_gemma4_ropes(fields, attention, list_types(attention))
    if prefix in ("Gemma3", "Olmo3"):
        thetas = {_FULL: family.rope_theta, _SLIDING: family.rope_theta}
        if prefix == "Gemma3":
            thetas = {_FULL: 1_000_000.0, _SLIDING: float(fields.get("rope_local_base_freq", 10_000.0))}
        elif float(fields.get("rope_theta") or family.rope_theta) != family.rope_theta:
            # transformers then gives it to the layers without a window alone, which may not be what the model had.
            raise UnsupportedField(f"rope_theta is {fields['rope_theta']}; only {family.rope_theta} is supported")
        by_type = read_ropes_by_layer_type(fields, head_dim, thetas)
        return tuple(by_type[_FULL if layer.window is None else _SLIDING] for layer in attention)
    if family.delta is not None:
        # The sections are those of images: the three positions of a text's token are the same.
        fields = _drop_settings(fields, _SECTIONS)
    query_scaling = 0.0
    if prefix == "Ministral3":
        settings = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        query_scaling = float(settings.get(_QUERY_SCALING) or 0.0)
        fields = _drop_settings(fields, (_QUERY_SCALING, "max_position_embeddings"))
    is_partial = prefix == "Phi3" or family.delta is not None
    rope = read_rope(fields, head_dim, theta=family.rope_theta, partial=is_partial)
    if query_scaling:
        rope = replace(rope, query_scaling=query_scaling)
    if "no_rope_layers" not in family.extra_fields:
        return (rope,) * len(attention)
    without = Rope(NO_ROPE, head_dim, {})
    return tuple(rope if has_rope else without for has_rope in _read_rope_layers(fields, len(attention)))


def read_latent_attention(sizes: LatentConfig, fields: dict[str, Any]) -> tuple[LayerAttentionConfig, ...]:
    """Return the attention of each layer to latents."""
    num_layers = int(fields["num_hidden_layers"])
    if num_layers < 1:
        raise EngineError(f"num_hidden_layers is {num_layers}; it must be 1 or more")
    return (sizes.attention(fields),) * num_layers


def read_latent_ropes(sizes: LatentConfig, family: Family, fields: dict[str, Any]) -> tuple[Rope, ...]:
    """Return the rotary embedding of each layer, of the rotated part of queries and keys."""
    rope = read_rope(fields, sizes.rotated, theta=family.rope_theta, partial=False)
    return (rope,) * int(fields["num_hidden_layers"])


def _drop_settings(fields: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields without these settings of rotary embeddings."""
    settings = {key: fields.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    return fields | {
        key: {name: value for name, value in one.items() if name not in names} for key, one in settings.items()
    }


def _read_rope_layers(fields: dict[str, Any], num_layers: int) -> list[bool]:
    """Return for each layer whether it has a rotary embedding."""
    has_rope = fields.get("no_rope_layers")  # which lists the others, in spite of its name
    if has_rope is None:
        interval = int(fields.get("no_rope_layer_interval") or 4)
        has_rope = [(layer + 1) % interval for layer in range(num_layers)]
    if len(has_rope) < num_layers:
        raise EngineError(f"no_rope_layers must be {num_layers} of 0 and 1, but is {has_rope}")
    return [bool(one) for one in has_rope[:num_layers]]


def read_state_layers(family: Family, fields: dict[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers that keep a state instead of keys."""
    if family.has_convolutions:
        types = fields.get("layer_types")
        if types is None:
            full = fields.get("full_attn_idxs") or range(num_layers)
            types = [_FULL if layer in full else _CONVOLUTION for layer in range(num_layers)]
        if len(types) != num_layers or set(types) != {_CONVOLUTION, _FULL}:
            raise UnsupportedField(
                f"layer_types is {types}; only {num_layers} of {_CONVOLUTION!r} and {_FULL!r}, with both, is supported"
            )
    elif family.delta is not None:
        types = _read_mixers(fields, num_layers)
    else:
        return frozenset()
    return frozenset(index for index, kind in enumerate(types) if kind != _FULL)


def _read_mixers(fields: dict[str, Any], num_layers: int) -> list[str]:
    """Return for each layer of a hybrid model whether it has attention or a delta rule."""
    interval = int(fields["full_attention_interval"])
    types = fields.get("layer_types") or [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    types = ["linear_attention" if kind == "mamba" else str(kind) for kind in types]
    if len(types) != num_layers or not set(types) <= {_LINEAR, _FULL} or _FULL not in types:
        raise EngineError(f"layer_types must be {num_layers} of {_LINEAR!r} and {_FULL!r}, with both, but is {types}")
    return types


def _read_window(prefix: str, family: Family, fields: dict[str, Any]) -> int | None:
    """Return the length of the sliding window, if any layer may have one."""
    window = fields.get("sliding_window")
    if "use_sliding_window" in family.extra_fields and not fields.get("use_sliding_window"):
        window = None
    if prefix == "Qwen3Moe" and window is not None and fields.get("max_window_layers"):
        # transformers then gives the window to all layers, which contradicts the field.
        raise UnsupportedField("max_window_layers with use_sliding_window is not supported for this architecture")
    if window is not None and int(window) < 1:
        raise EngineError(f"sliding_window is {window}; it must be 1 or more")
    return None if window is None else int(window)


def _read_layer_types(
    prefix: str, family: Family, fields: dict[str, Any], num_layers: int, window: int | None
) -> list[str]:
    """Return for each layer whether it sees all keys or a sliding window."""
    types = fields.get("layer_types")
    if types is None:
        types = _default_layer_types(prefix, family, fields=fields, num_layers=num_layers, window=window)
    if len(types) != num_layers:
        raise EngineError(f"layer_types must be {num_layers} of {_FULL!r} and {_SLIDING!r}, but is {types}")
    if others := set(types) - {_FULL, _SLIDING}:
        raise UnsupportedField(f"layer_types has {', '.join(sorted(map(str, others)))}, which is not supported")
    if prefix == "Gemma4":
        types = [*types[:-1], _FULL]  # as transformers does, whatever the config says
    if _SLIDING in types and window is None:
        raise EngineError("layer_types asks for sliding_attention, but there is no sliding_window")
    return list(types)


def _default_layer_types(
    prefix: str, family: Family, fields: dict[str, Any], num_layers: int, window: int | None
) -> list[str]:
    """Return the layer types that transformers derives from older fields."""
    if prefix in ("Qwen2", "Qwen3"):
        first = num_layers if window is None else int(fields.get("max_window_layers", 28))
        return [_FULL if layer < first else _SLIDING for layer in range(num_layers)]
    if prefix == "SmolLM3":
        has_rope = _read_rope_layers(fields, num_layers)
        return [_FULL if one or window is None else _SLIDING for one in has_rope]
    if family.full_period is not None:
        pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern")  # Gemma 3's alone
        period = int(pattern or family.full_period)
        return [_SLIDING if (layer + 1) % period else _FULL for layer in range(num_layers)]
    return [_FULL if window is None else _SLIDING] * num_layers


def read_multiplier(fields: dict[str, Any], name: str) -> float:
    """Return a factor of Granite; 1 if there is none."""
    value = float(fields.get(name, 1.0))
    if not value > 0:
        raise EngineError(f"{name} is {value}; it must be more than 0")
    return value


def read_scales(fields: dict[str, Any]) -> tuple[float, float]:
    """Return the factors of the embeddings and of the logits of Granite and Falcon-H1; 1 if there are none."""
    logits = read_multiplier(fields, "lm_head_multiplier") / read_multiplier(fields, "logits_scaling")
    return read_multiplier(fields, "embedding_multiplier"), logits


def read_softcap(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is not None and not float(value) > 0:
        raise EngineError(f"{name} is {value}; it must be more than 0, or null")
    return None if value is None else float(value)
