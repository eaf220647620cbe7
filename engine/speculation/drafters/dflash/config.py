"""The ``config.json`` of a DFlash head, in the format of its authors (https://github.com/z-lab/dflash).

It is that of a Qwen3 model without embeddings and output projection, with ``dflash_config``: ``target_layer_ids`` are
the indices of the target's layers whose outputs the head reads, ``mask_token_id`` is the token of a position to
predict, ``block_size`` the number of positions that were trained together, the last known token's included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.attention.layer import HeadShape, LayerAttentionConfig
from engine.models.config import ModelConfig, name_bad_fields, read_json
from engine.models.config_fields import WITHOUT_INFLUENCE
from engine.models.rope import Rope
from engine.protocol.types import EngineError
from engine.speculation.drafters.head_config import fits, read_count, read_head_rope, refuse_unknown_fields

KIND = "dflash"
_CLASSES = {"DFlashDraftModel", "Qwen3DFlashDraftModel"}
_CLASS2 = "DFlash2DraftModel"
"""Class of heads with convolutions and a selector."""
_DEFAULT_EPS = 1e-6
_DEFAULT_BLOCK = 16
_LAYER_TYPES = ("full_attention", "sliding_attention")
_FIELDS = {
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "original_max_position_embeddings", "attention_bias", "layer_types"),
    *("sliding_window", "is_causal", "dflash_config", "block_size", "mask_token_id", "target_layer_ids"),
    # Read by transformers for models of which this is none: it has neither embeddings nor an output projection, and a
    # window has influence through the layer types alone.
    *("tie_word_embeddings", "use_sliding_window", "max_window_layers", "eos_token_id", "num_target_layers"),
}
_OWN_FIELDS = {
    *("block_size", "mask_token_id", "target_layer_ids", "causal", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
}
"""Fields of ``dflash_config``."""


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """Sizes of what DFlash 2 adds."""

    width: int
    """Positions that a convolution reads, a position's own included."""
    group: int
    """Channels that share a factor of a position."""
    rank: int
    top_k: int
    """Candidates of a position."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and variants of a head that fits its target."""

    hidden_size: int
    intermediate_size: int
    attention: tuple[LayerAttentionConfig, ...]
    """The attention of each layer."""
    causal: tuple[bool, ...]
    """For each layer, whether a position to predict sees only those before it."""
    rope: Rope
    norm_eps: float
    target_layers: tuple[int, ...]
    """Numbers of the target's layers, from 1, whose outputs are read, ascending."""
    mask_token: int
    block_size: int
    has_bias: bool
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    selector: SelectorConfig | None

    @property
    def key_shapes(self) -> tuple[HeadShape, ...]:
        """The shapes of the layers, see ``Drafter.key_shapes``."""
        return tuple(layer.shape for layer in self.attention)


def is_dflash(fields: dict[str, Any]) -> bool:
    """Return True if a ``config.json`` says that it is a DFlash head's."""
    return bool({*_CLASSES, _CLASS2} & set(fields.get("architectures") or ()))


def read_dflash_config(folder: Path, target: ModelConfig) -> DFlashConfig:
    """Read the config of the head in ``folder``.

    Raises ``EngineError`` if it is no such head's, asks for something that is not computed here, or does not fit the
    target, with the two numbers.
    """
    path = folder / "config.json"
    fields = read_json(path)
    with name_bad_fields(path):
        return _read_config(path, fields, target)


def _read_config(path: Path, fields: dict[str, Any], target: ModelConfig) -> DFlashConfig:
    if not is_dflash(fields):
        classes = ", ".join(sorted({*_CLASSES, _CLASS2}))
        raise EngineError(
            f"{path} is not a DFlash head's: architectures are {fields.get('architectures')!r}, not {classes}"
        )
    own = fields.get("dflash_config") or {}
    refuse_unknown_fields(
        path, {name: value for name, value in fields.items() if name not in _FIELDS}, WITHOUT_INFLUENCE
    )
    refuse_unknown_fields(path, own, _OWN_FIELDS)
    own = {name: fields[name] for name in ("block_size", "mask_token_id", "target_layer_ids") if name in fields} | own
    if fields.get("hidden_act", "silu") != "silu":
        raise EngineError(f"{path}: hidden_act {fields['hidden_act']!r} is not supported; supported is 'silu'")
    fits(path, "hidden_size", read_count(path, fields, "hidden_size"), target.hidden_size)
    fits(path, "vocab_size", read_count(path, fields, "vocab_size"), target.vocab_size)
    attention = _read_attention(path, fields)
    is_causal = own.get("causal", fields.get("is_causal"))
    block = read_count(path, {"block_size": _DEFAULT_BLOCK} | own, "block_size")
    mask = own["mask_token_id"]
    if block < 2:
        raise EngineError(f"{path}: block_size is {block}; a block has the last token and at least one to predict")
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        raise EngineError(
            f"{path}: mask_token_id is {mask!r}, which the target's embeddings, of {target.vocab_size} tokens, lack"
        )
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=read_count(path, fields, "intermediate_size"),
        attention=attention,
        causal=tuple(layer.window is not None if is_causal is None else bool(is_causal) for layer in attention),
        rope=read_head_rope(path, {"max_position_embeddings": target.max_context} | fields, attention[0].head_dim),
        norm_eps=float(fields.get("rms_norm_eps", _DEFAULT_EPS)),
        target_layers=_read_target_layers(path, own["target_layer_ids"], target.num_layers),
        mask_token=mask,
        block_size=block,
        has_bias=bool(fields.get("attention_bias")),
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        logit_scale=float(own.get("output_multiplier") or 1.0),
        logit_softcap=float(own["final_logit_softcapping"]) if own.get("final_logit_softcapping") else None,
        selector=_read_selector(path, own, target.hidden_size) if _CLASS2 in fields["architectures"] else None,
    )


def _read_attention(path: Path, fields: dict[str, Any]) -> tuple[LayerAttentionConfig, ...]:
    count, heads = (read_count(path, fields, name) for name in ("num_hidden_layers", "num_attention_heads"))
    kv_heads = read_count(path, fields, "num_key_value_heads") if fields.get("num_key_value_heads") else heads
    dim = read_count(path, fields, "head_dim") if fields.get("head_dim") else fields["hidden_size"] // heads
    if heads % kv_heads:
        raise EngineError(f"{path}: {heads} heads cannot share {kv_heads} key-value heads")
    kinds = fields.get("layer_types") or ["full_attention"] * count
    if len(kinds) != count or not set(kinds) <= set(_LAYER_TYPES):
        raise EngineError(f"{path}: layer_types must be {count} of {', '.join(_LAYER_TYPES)}, but are {kinds!r}")
    window = read_count(path, fields, "sliding_window") if "sliding_attention" in kinds else None
    return tuple(
        LayerAttentionConfig(
            heads, kv_heads, head_dim=dim, scale=dim**-0.5, window=window if kind == "sliding_attention" else None
        )
        for kind in kinds
    )


def _read_target_layers(path: Path, indices: list[int], num_layers: int) -> tuple[int, ...]:
    layers = [index + 1 for index in indices]
    if not layers or sorted(set(layers)) != layers or not 1 <= layers[0] <= layers[-1] < num_layers:
        raise EngineError(
            f"{path}: target_layer_ids are {indices}; they must ascend from 0 to {num_layers - 2}, since the target "
            f"has {num_layers} layers"
        )
    return tuple(layers)


def _read_selector(path: Path, own: dict[str, Any], hidden: int) -> SelectorConfig:
    names = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
    width, group, rank, top_k = (read_count(path, own, name) for name in names)
    if hidden % group:
        raise EngineError(f"{path}: conv_group_size is {group}, which does not divide the hidden_size of {hidden}")
    return SelectorConfig(width, group, rank, top_k)
