"""The ``config.json`` of an EAGLE-3 head, in both public formats.

- ``speculators`` (vLLM): ``speculators_model_type`` is ``eagle3``, ``transformer_layer_config`` has the layer's sizes.
- SafeAILab, SpecForge and ModelOpt: the config of a Llama model with one layer, with ``draft_vocab_size``.

``eagle_aux_hidden_state_layer_ids`` names the target's hidden states that the head fuses. At the top level, where vLLM
reads it, a number counts the layers before the state: 2 is the input of the third layer. Inside ``eagle_config``, where
SpecForge and SGLang read it, it is the index of the layer that outputs the state: 1 for the same one. Without it the
head was trained on the input of layers 2, ``n / 2`` and ``n - 3`` of ``n``, counted from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.attention.layer import LayerAttentionConfig
from engine.models.config import ModelConfig, name_bad_fields, read_json
from engine.models.config_fields import WITHOUT_INFLUENCE
from engine.models.rope import Rope
from engine.protocol.types import EngineError
from engine.speculation.drafters.head_config import fits, read_count, read_head_rope, refuse_unknown_fields

KIND = "eagle3"
_SPECULATORS_CLASSES = {"Eagle3Speculator", "Eagle3DraftModel"}
_LLAMA_CLASSES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
_PLAIN_CLASS = "LlamaForCausalLM"
"""Class in configs that SafeAILab trained with; the same as that of a whole model."""
_LAYER_TYPES = ("llama", "qwen3")
_DEFAULT_EPS = 1e-6

_HEAD_FIELDS = {
    *("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"),
    *("norm_before_fc", "fc_norm", "norm_output", "architectures"),
}
"""Fields that describe the head, in both formats."""
_LAYER_FIELDS = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "original_max_position_embeddings", "attention_bias", "mlp_bias"),
    *("layer_types", "use_sliding_window"),
}
"""Fields that describe the layer."""
_IGNORED_FIELDS = {
    # The head has an output projection of its own, and a window has influence through the layer types alone.
    *(
        "tie_word_embeddings",
        "eos_token_id",
        "sliding_window",
        "max_window_layers",
        "architectures",
        "target_model_type",
    ),
    # Training only; and where, and how many tokens at once, the head was meant to draft.
    *(
        "embed_requires_grad",
        "speculators_version",
        "speculators_config",
        "has_no_defaults_at_init",
        "base_model_ep_plan",
    ),
}
_EAGLE_CONFIG = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Fields of ``eagle_config`` beside the layers, with the value that describes the head computed here."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes and variants of a head that fits its target."""

    hidden_size: int
    intermediate_size: int
    draft_vocab_size: int
    attention: LayerAttentionConfig
    rope: Rope
    norm_eps: float
    target_layers: tuple[int, ...]
    """Numbers of the target's layers, from 1, after which the fused hidden states are taken, ascending."""
    has_attention_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    norm_before_residual: bool
    """Add the attention's output to the normalised features, not to the features."""
    norm_before_fc: bool
    """Normalise the concatenated hidden states before they are fused."""
    fc_norm: bool
    """Normalise each of the hidden states before they are fused."""
    norm_output: bool
    """Draft on from normalised outputs."""


def is_eagle3(fields: dict[str, Any]) -> bool:
    """Return True if a ``config.json`` says that it is an EAGLE-3 head's, whoever trained it."""
    if fields.get("speculators_model_type") == KIND:
        return True
    classes = set(fields.get("architectures") or ())
    return bool(classes & _LLAMA_CLASSES) or (_PLAIN_CLASS in classes and "draft_vocab_size" in fields)


def read_eagle3_config(folder: Path, target: ModelConfig) -> Eagle3Config:
    """Read the config of the head in ``folder``.

    Raises ``EngineError`` if it is no such head's, asks for something that is not computed here, or does not fit the
    target, with the two numbers.
    """
    path = folder / "config.json"
    fields = read_json(path)
    with name_bad_fields(path):
        return _read_config(path, fields, target)


def _read_config(path: Path, fields: dict[str, Any], target: ModelConfig) -> Eagle3Config:
    layer = _select_layer_fields(path, fields)
    hidden, vocab = read_count(path, layer, "hidden_size"), read_count(path, layer, "vocab_size")
    fits(path, "vocab_size", vocab, target.vocab_size)
    if fields.get("target_hidden_size"):
        fits(path, "target_hidden_size", read_count(path, fields, "target_hidden_size"), target.hidden_size)
    else:
        fits(path, "hidden_size", hidden, target.hidden_size)
    if (num_layers := read_count(path, layer, "num_hidden_layers")) != 1:
        raise EngineError(f"{path}: num_hidden_layers is {num_layers}; only heads of one layer are supported")
    if layer.get("hidden_act", "silu") != "silu":
        raise EngineError(f"{path}: hidden_act {layer['hidden_act']!r} is not supported; supported is 'silu'")
    if layer.get("use_sliding_window") or "sliding_attention" in (layer.get("layer_types") or ()):
        raise EngineError(f"{path}: a sliding window is not supported; the layer must attend to all tokens")
    attention = _read_attention(path, layer, hidden, target)
    draft_vocab = read_count(path, fields, "draft_vocab_size") if fields.get("draft_vocab_size") else vocab
    if draft_vocab > vocab:
        raise EngineError(f"{path}: draft_vocab_size is {draft_vocab}, but vocab_size is {vocab}")
    if fields.get("norm_before_fc") and fields.get("fc_norm"):
        raise EngineError(f"{path}: norm_before_fc and fc_norm exclude each other; only one of them can be true")
    rope_fields = {"max_position_embeddings": target.max_context} | layer
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=read_count(path, layer, "intermediate_size"),
        draft_vocab_size=draft_vocab,
        attention=attention,
        rope=read_head_rope(path, rope_fields, attention.head_dim),
        norm_eps=float(layer.get("rms_norm_eps", _DEFAULT_EPS)),
        target_layers=_read_target_layers(path, fields, target.num_layers),
        has_attention_bias=bool(layer.get("attention_bias")),
        has_mlp_bias=bool(layer.get("mlp_bias")),
        has_qk_norm=layer.get("model_type") == "qwen3",
        norm_before_residual=bool(fields.get("norm_before_residual")),
        norm_before_fc=bool(fields.get("norm_before_fc")),
        fc_norm=bool(fields.get("fc_norm")),
        norm_output=bool(fields.get("norm_output")),
    )


def _select_layer_fields(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the layer, after a check of the format and of all names."""
    known = _HEAD_FIELDS | _IGNORED_FIELDS | WITHOUT_INFLUENCE
    if "speculators_model_type" in fields:
        if fields["speculators_model_type"] != KIND:
            raise EngineError(f"{path}: speculators_model_type is {fields['speculators_model_type']!r}, not {KIND!r}")
        layer = fields["transformer_layer_config"]
        if not isinstance(layer, dict) or layer.get("model_type") not in _LAYER_TYPES:
            kind = layer.get("model_type") if isinstance(layer, dict) else layer
            supported = ", ".join(_LAYER_TYPES)
            raise EngineError(
                f"{path}: a transformer_layer_config of {kind!r} is not supported; supported: {supported}"
            )
        refuse_unknown_fields(path, fields, known | {"speculators_model_type", "transformer_layer_config"})
        refuse_unknown_fields(path, layer, _LAYER_FIELDS | _IGNORED_FIELDS | WITHOUT_INFLUENCE)
        return layer
    if not is_eagle3(fields):
        classes = sorted(_SPECULATORS_CLASSES | _LLAMA_CLASSES)
        raise EngineError(
            f"{path} is not an EAGLE-3 head's: architectures are {fields.get('architectures')!r}, not one of "
            f"{', '.join(classes)}, nor {_PLAIN_CLASS} with draft_vocab_size"
        )
    refuse_unknown_fields(path, fields, known | _LAYER_FIELDS | {"eagle_config"})
    return fields


def _read_attention(path: Path, layer: dict[str, Any], hidden: int, target: ModelConfig) -> LayerAttentionConfig:
    """Return the layer's attention, whose keys and values lie in the target's pages and have their sizes."""
    heads = read_count(path, layer, "num_attention_heads")
    kv_heads = read_count(path, layer, "num_key_value_heads") if layer.get("num_key_value_heads") else heads
    head_dim = read_count(path, layer, "head_dim") if layer.get("head_dim") else hidden // heads
    fits(path, "num_key_value_heads", kv_heads, target.kv_heads)
    fits(path, "head_dim", head_dim, target.head_dim)
    if heads % kv_heads:
        raise EngineError(f"{path}: {heads} heads cannot share {kv_heads} key-value heads")
    return LayerAttentionConfig(heads, kv_heads, head_dim, head_dim**-0.5)


def _read_target_layers(path: Path, fields: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers whose hidden states are fused."""
    eagle_config = fields.get("eagle_config") or {}
    ignored = {"eagle_aux_hidden_state_layer_ids", "parallel_draft_heads_num_layers"}
    for name, value in eagle_config.items():
        if name not in ignored and value is not None and value != _EAGLE_CONFIG.get(name, False):
            only = f"; only {_EAGLE_CONFIG[name]!r} is supported" if name in _EAGLE_CONFIG else " and not supported"
            raise EngineError(f"{path}: {name} of eagle_config is {value!r}{only}")
    layers = fields.get("eagle_aux_hidden_state_layer_ids")
    if not layers:
        layers = [layer + 1 for layer in eagle_config.get("eagle_aux_hidden_state_layer_ids") or ()]
    origin = "eagle_aux_hidden_state_layer_ids"
    if not layers:
        layers, origin = [2, num_layers // 2, num_layers - 3], "without eagle_aux_hidden_state_layer_ids the head"
    # Each engine hands the states over in the order of its layers, so another order never had a meaning.
    if sorted(set(layers)) != list(layers) or not 1 <= layers[0] <= layers[-1] < num_layers:
        raise EngineError(
            f"{path}: {origin} selects the hidden states after {', '.join(map(str, layers))} layers; they must ascend "
            f"from 1 to {num_layers - 1}, since the target has {num_layers} layers"
        )
    return tuple(layers)
