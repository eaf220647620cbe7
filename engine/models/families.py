"""The Llama family: which architectures are defined here, and what their ``config.json`` may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.attention.layer import LayerAttentionConfig
from engine.models.config import ModelConfig, RawConfig
from engine.models.config_fields import READ, WITHOUT_INFLUENCE, refuse_unknown
from engine.models.rope import Rope, read_rope, read_ropes_by_layer_type
from engine.protocol.types import EngineError

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538) as feed-forward layers."""

    layers: frozenset[int]
    """Layers that have it; the others are dense."""
    experts: int
    chosen: int
    """Experts that each token goes to."""
    intermediate: int
    normalised: bool
    """The weights of a token's chosen experts are made to sum to 1."""
    router: str
    """Name of the router in a layer, and of the experts' list next to it."""
    names: tuple[str, str, str]
    """What gate, up and down of an expert are called."""


@dataclass(frozen=True, slots=True)
class Head:
    """What makes logits of the final hidden states."""

    matrices: tuple[str, ...]
    """Names of its matrices, each multiplied with what the one before it made; a ReLU stands between two."""
    bias: bool
    beside: bool = False
    """The checkpoint may hold a language model's head too, which is not read."""


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """The numbers that define a Llama-family decoder."""

    intermediate: int
    norm_eps: float
    norm_offset: float
    """Added to every norm's weights (Gemma stores them as differences from 1)."""
    post_norms: bool
    """What attention and feed-forward return is normalised before it is added."""
    activation: str
    embedding_scale: float
    logit_softcap: float | None
    """Logits become ``softcap * tanh(logits / softcap)``."""
    qk_norm: bool
    """Queries and keys are normalised per head."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head: Head
    tied: bool
    """A language model's output projection is the embedding table."""
    fused: bool
    """The checkpoint keeps query, key and value in one tensor, gate and up in another."""
    ropes: tuple[Rope, ...]
    """The rotary embedding of each layer."""
    experts: ExpertsConfig | None


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture differs from Llama."""

    reads: frozenset[str] = frozenset()
    """Fields that only this family has."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What transformers takes where a field is missing and its shape would not tell."""
    theta: float = 10_000.0
    qk_norm: bool = False
    gemma: bool = False
    """Scaled embeddings, norms around each part, and gelu."""
    fused: bool = False
    classifies: bool = True


_WINDOWS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_GEMMA = frozenset(
    {"hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "sliding_window", "layer_types"}
)
_GEMMA_DEFAULTS = {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})

_FAMILIES = {
    "Llama": _Family(frozenset({"attention_bias", "mlp_bias"})),
    "Mistral": _Family(frozenset({"sliding_window"}), {"sliding_window": 4096}),
    "Mixtral": _Family(frozenset({"sliding_window"}) | _EXPERTS, theta=1_000_000.0),
    "Qwen2": _Family(_WINDOWS, {"sliding_window": 4096}),
    "Qwen3": _Family(_WINDOWS | {"attention_bias"}, {"sliding_window": 4096}, qk_norm=True),
    "Qwen3Moe": _Family(
        frozenset({"sliding_window", "use_sliding_window", "attention_bias", "moe_intermediate_size"})
        | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "max_window_layers"}
        | _EXPERTS,
        {"sliding_window": 4096},
        qk_norm=True,
    ),
    "Phi3": _Family(frozenset({"sliding_window"}), fused=True),
    "Gemma2": _Family(
        _GEMMA | {"attention_bias", "attn_logit_softcapping"},
        _GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        gemma=True,
    ),
    "Gemma3": _Family(
        _GEMMA | {"attention_bias", "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        _GEMMA_DEFAULTS,
        qk_norm=True,
        gemma=True,
        classifies=False,
    ),
}
"""By the beginning of the architecture's name."""


_REWARD_HEADS = {
    # https://huggingface.co/Qwen/Qwen2.5-Math-PRM-7B: two layers, labels bad and good.
    "Qwen2ForProcessRewardModel": (2, Head(("score.0", "score.2"), bias=True, beside=True)),
    # https://huggingface.co/Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B: TRL's value head.
    "Qwen2ForPrmModel": (1, Head(("v_head.summary",), bias=True, beside=True)),
}
"""Architectures that transformers does not have, with the number of their labels."""


def is_defined(architecture: str) -> bool:
    """Whether ``decoder_config`` knows the architecture."""
    prefix, kind = _split(architecture)
    if prefix not in _FAMILIES:
        return False
    classifier = kind in ("TokenClassification", "SequenceClassification")
    return kind == "CausalLM" or architecture in _REWARD_HEADS or (classifier and _FAMILIES[prefix].classifies)


def known_fields(architecture: str) -> set[str]:
    """The fields that a config of a defined architecture may have at any value."""
    return READ | WITHOUT_INFLUENCE | _FAMILIES[_split(architecture)[0]].reads


def decoder_config(raw: RawConfig) -> DecoderConfig:
    """Raises ``EngineError`` when the config lacks a field or asks for what is not computed here."""
    try:
        return _config(raw)
    except KeyError as missing:
        raise EngineError(f"{raw.folder / 'config.json'} lacks {missing}") from None
    except (TypeError, ValueError) as error:
        raise EngineError(f"{raw.folder / 'config.json'} has a value of the wrong kind: {error}") from None
    except EngineError as error:
        raise EngineError(f"{raw.folder}: {error}") from None


def _config(raw: RawConfig) -> DecoderConfig:
    prefix, _ = _split(raw.architecture)
    family = _FAMILIES[prefix]
    fields = family.defaults | raw.fields
    refuse_unknown(fields, known_fields(raw.architecture))
    layers, hidden = int(fields["num_hidden_layers"]), int(fields["hidden_size"])
    heads = int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    head_dim = int(fields.get("head_dim") or hidden // heads)
    if min(layers, hidden, heads, kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise EngineError(
            f"{layers} layers of {heads} heads of {head_dim} on {kv_heads} key-value heads are no decoder's shape"
        )
    positions = int(fields["max_position_embeddings"])
    if positions < 1:
        raise EngineError(f"max_position_embeddings is {positions}; it must be 1 or more")
    types = _layer_types(prefix, fields, layers)
    if prefix == "Gemma3":
        by_type = read_ropes_by_layer_type(fields, head_dim)
        ropes = [by_type[one] for one in types]
    else:
        ropes = [read_rope(fields, head_dim, theta=family.theta, partial=prefix == "Phi3")] * layers
    scale = float(fields["query_pre_attn_scalar"] if family.gemma else head_dim) ** -0.5
    softcap = _softcap(fields, "attn_logit_softcapping")
    attention_bias = bool(fields.get("attention_bias"))
    labels, head = _head(raw.architecture, fields)
    return DecoderConfig(
        architecture=raw.architecture,
        vocab_size=int(fields["vocab_size"]),
        max_context=min(rope.context(positions) for rope in ropes),
        num_labels=labels,
        eos=raw.eos,
        extra=raw.extra,
        attention=tuple(
            LayerAttentionConfig(
                heads, kv_heads, head_dim, scale, int(fields["sliding_window"]) if one == _SLIDING else None, softcap
            )
            for one in types
        ),
        hidden_size=hidden,
        intermediate=int(fields["intermediate_size"]),
        norm_eps=float(fields["rms_norm_eps"]),
        norm_offset=1.0 if family.gemma else 0.0,
        post_norms=family.gemma,
        activation=_activation(fields, gemma=family.gemma),
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        logit_softcap=_softcap(fields, "final_logit_softcapping"),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias or prefix == "Qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias")),
        head=head,
        tied=bool(fields.get("tie_word_embeddings", False)),
        fused=family.fused,
        ropes=tuple(ropes),
        experts=_experts(prefix, fields, layers),
    )


def _head(architecture: str, fields: dict[str, Any]) -> tuple[int, Head]:
    """The number of labels, 0 of a language model, and the head."""
    if architecture in _REWARD_HEADS:
        return _REWARD_HEADS[architecture]
    kind = _split(architecture)[1]
    if kind == "CausalLM":
        return 0, Head(("lm_head",), bias=False)
    # transformers leaves the label map out when there are the default two.
    labels = len(fields.get("id2label") or range(fields.get("num_labels", 2)))
    bias = kind == "TokenClassification" and bool(fields.get("token_classification_bias", True))
    return labels, Head(("score",), bias=bias)


def _layer_types(prefix: str, fields: dict[str, Any], layers: int) -> list[str]:
    """Whether each layer has the sliding window."""
    window = fields.get("sliding_window")
    if prefix.startswith("Qwen") and not fields.get("use_sliding_window"):
        window = None
    if prefix == "Qwen3Moe" and window is not None and fields.get("max_window_layers"):
        # transformers then gives the window to all layers, which contradicts the field.
        raise EngineError("max_window_layers with use_sliding_window is not supported for this architecture")
    if window is not None and int(window) < 1:
        raise EngineError(f"sliding_window is {window}; it must be 1 or more")
    types = fields.get("layer_types")
    if types is None:
        if prefix in ("Qwen2", "Qwen3"):
            first = int(fields.get("max_window_layers", 28))
            types = [_SLIDING if window is not None and layer >= first else _FULL for layer in range(layers)]
        elif prefix in ("Gemma2", "Gemma3"):
            period = 2 if prefix == "Gemma2" else _gemma3_period(fields)
            types = [_SLIDING if (layer + 1) % period else _FULL for layer in range(layers)]
        else:
            types = [_FULL if window is None else _SLIDING] * layers
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise EngineError(f"layer_types must be {layers} of {_FULL!r} and {_SLIDING!r}, but is {types}")
    if _SLIDING in types and window is None:
        raise EngineError("layer_types asks for sliding_attention, but there is no sliding_window")
    return list(types)


def _gemma3_period(fields: dict[str, Any]) -> int:
    return int(fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 6)


def _activation(fields: dict[str, Any], *, gemma: bool) -> str:
    name = "hidden_activation" if gemma else "hidden_act"
    supported = "gelu_pytorch_tanh" if gemma else "silu"
    # Gemma's configs have both names; only the first is read, so the second must not contradict it.
    for one in (name, "hidden_act"):
        if fields.get(one, supported) != supported:
            raise EngineError(f"{one} {fields[one]!r} is not supported; supported is {supported!r}")
    return supported


def _experts(prefix: str, fields: dict[str, Any], layers: int) -> ExpertsConfig | None:
    if prefix == "Mixtral":
        chosen = list(range(layers))
        router, names, intermediate = "block_sparse_moe", ("w1", "w3", "w2"), fields["intermediate_size"]
    elif prefix == "Qwen3Moe":
        dense, step = set(fields.get("mlp_only_layers") or ()), int(fields.get("decoder_sparse_step", 1))
        chosen = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
        router, names, intermediate = "mlp", ("gate_proj", "up_proj", "down_proj"), fields["moe_intermediate_size"]
    else:
        return None
    experts = int(fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"])
    per_token = int(fields["num_experts_per_tok"])
    if not 1 <= per_token <= experts:
        raise EngineError(f"num_experts_per_tok is {per_token}; it must be 1 to the number of experts, {experts}")
    return ExpertsConfig(
        layers=frozenset(chosen),
        experts=experts,
        chosen=per_token,
        intermediate=int(intermediate),
        normalised=prefix == "Mixtral" or bool(fields.get("norm_topk_prob", False)),
        router=router,
        names=names,
    )


def _softcap(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is not None and not float(value) > 0:
        raise EngineError(f"{name} is {value}; it must be more than 0, or null")
    return None if value is None else float(value)


def _split(architecture: str) -> tuple[str, str]:
    prefix, _, kind = architecture.partition("For")
    return prefix, kind
