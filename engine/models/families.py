"""Llama-family architectures: read their ``config.json`` into a ``DecoderConfig``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.attention.layer import LayerAttentionConfig
from engine.models.config import ModelConfig, RawConfig
from engine.models.config_fields import READ, WITHOUT_INFLUENCE, UnsupportedField, refuse_unknown
from engine.models.delta_config import FIELDS as DELTA_FIELDS
from engine.models.delta_config import DeltaConfig, read_delta
from engine.models.rope import Rope, read_rope, read_ropes_by_layer_type
from engine.protocol.types import EngineError

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538) as feed-forward layers."""

    layers: frozenset[int]
    """Indices of the layers with experts; the others are dense."""
    num_experts: int
    per_token: int
    """Experts that each token is routed to."""
    intermediate: int
    is_normalized: bool
    """Scale the weights of a token's experts to sum to 1."""
    router: str
    """Name of the module in a layer that holds the router and the experts."""
    names: tuple[str, str, str]
    """Names of an expert's gate, up and down projections."""
    shared_intermediate: int = 0
    """Size of the expert that every token is routed to, if there is one."""


@dataclass(frozen=True, slots=True)
class Head:
    """Matrices that turn final hidden states into logits."""

    matrices: tuple[str, ...]
    """Names of the matrices, applied one after the other with a ReLU between two."""
    bias: bool
    may_have_lm_head: bool = False
    """The checkpoint may also hold a language model's head, which is ignored."""


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    intermediate: int
    norm_eps: float
    norm_offset: float
    """Offset of every norm's weights (Gemma stores them as differences from 1)."""
    post_norms: bool
    """Normalise the outputs of attention and feed-forward before adding them."""
    activation: str
    embedding_scale: float
    logit_softcap: float | None
    """Logits become ``softcap * tanh(logits / softcap)``."""
    qk_norm: bool
    """Normalise queries and keys per head."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head: Head
    tied: bool
    """Use the embedding table as a language model's output projection."""
    fused: bool
    """Query, key and value are one tensor in the checkpoint, gate and up another."""
    ropes: tuple[Rope, ...]
    experts: ExpertsConfig | None
    delta: DeltaConfig | None = None
    """Sizes of the layers with a gated delta rule, if there are such layers."""
    delta_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences of an architecture from Llama."""

    extra_fields: frozenset[str] = frozenset()
    """Config fields that only this family has."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of transformers for fields that configs leave out and that no tensor's shape reveals."""
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    is_gemma: bool = False
    """Scale embeddings, normalise before and after each part, and use gelu."""
    fused: bool = False
    has_classifiers: bool = True
    delta: Literal["interleaved", "separate"] | None = None
    """The order of the projections of layers with a gated delta rule, of a family that has them."""


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
_DELTA = DELTA_FIELDS | {
    *("attention_bias", "attn_output_gate", "mamba_ssm_dtype", "mlp_only_layers"),
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers"),
}
_SECTIONS = ("mrope_section", "mrope_interleaved")
_DELTA_DEFAULTS = {"partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
_SHARED_EXPERT = frozenset(
    {"moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step"}
)
_EXPERTS = frozenset({"num_experts", "num_local_experts", "num_experts_per_tok"})

_FAMILIES = {
    "Llama": _Family(frozenset({"attention_bias", "mlp_bias"})),
    "Mistral": _Family(frozenset({"sliding_window"}), {"sliding_window": 4096}),
    "Mixtral": _Family(frozenset({"sliding_window"}) | _EXPERTS, rope_theta=1_000_000.0),
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
        is_gemma=True,
    ),
    "Gemma3": _Family(
        _GEMMA | {"attention_bias", "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
        _GEMMA_DEFAULTS,
        qk_norm=True,
        is_gemma=True,
        has_classifiers=False,
    ),
    "Qwen3Next": _Family(_DELTA | _EXPERTS | _SHARED_EXPERT, _DELTA_DEFAULTS, qk_norm=True, delta="interleaved"),
    "Qwen3_5": _Family(_DELTA, _DELTA_DEFAULTS, qk_norm=True, delta="separate"),
    "Qwen3_5Moe": _Family(_DELTA | _EXPERTS | _SHARED_EXPERT, _DELTA_DEFAULTS, qk_norm=True, delta="separate"),
}
"""Families by the prefix of the architecture's name."""

_REWARD_HEADS = {
    # https://huggingface.co/Qwen/Qwen2.5-Math-PRM-7B: two layers, the labels bad and good.
    "Qwen2ForProcessRewardModel": (2, Head(("score.0", "score.2"), bias=True, may_have_lm_head=True)),
    # https://huggingface.co/Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B: TRL's value head.
    "Qwen2ForPrmModel": (1, Head(("v_head.summary",), bias=True, may_have_lm_head=True)),
}
"""Architectures that transformers does not have: their number of labels and their head."""


def is_defined(architecture: str) -> bool:
    """Return True if ``decoder_config`` supports the architecture."""
    prefix, kind = _split(architecture)
    if prefix not in _FAMILIES:
        return False
    classifier = kind in ("TokenClassification", "SequenceClassification") and _FAMILIES[prefix].delta is None
    return kind == "CausalLM" or architecture in _REWARD_HEADS or (classifier and _FAMILIES[prefix].has_classifiers)


def known_fields(architecture: str) -> set[str]:
    """Return the fields that a config of a defined architecture may have with any value."""
    return READ | WITHOUT_INFLUENCE | _FAMILIES[_split(architecture)[0]].extra_fields


def decoder_config(raw: RawConfig) -> DecoderConfig:
    """Read a config. Raises ``UnsupportedField`` if it asks for a feature that is not computed here, and another
    ``EngineError`` if it lacks a field or has one without meaning.
    """
    try:
        return _read_config(raw)
    except KeyError as missing:
        raise EngineError(f"{raw.folder / 'config.json'} lacks {missing}") from None
    except (TypeError, ValueError) as error:
        raise EngineError(f"{raw.folder / 'config.json'} has a value of the wrong type: {error}") from None
    except EngineError as error:
        raise type(error)(f"{raw.folder}: {error}") from None


def _read_config(raw: RawConfig) -> DecoderConfig:
    prefix, _ = _split(raw.architecture)
    family = _FAMILIES[prefix]
    known = known_fields(raw.architecture)
    left_out = {name: value for name, value in raw.defaults.items() if name in known and value is not None}
    fields = family.defaults | left_out | raw.fields
    refuse_unknown(fields, known)
    hidden_size, positions = int(fields["hidden_size"]), int(fields["max_position_embeddings"])
    if positions < 1:
        raise EngineError(f"max_position_embeddings is {positions}; it must be 1 or more")
    layers = _read_attention(prefix, family, fields)
    delta = None if family.delta is None else read_delta(fields, is_interleaved=family.delta == "interleaved")
    types = _read_mixers(fields, len(layers)) if delta else []
    delta_layers = frozenset(index for index, kind in enumerate(types) if kind == _LINEAR)
    attention = tuple(layer for index, layer in enumerate(layers) if index not in delta_layers)
    ropes = _read_ropes(prefix, family, fields, attention)
    attention_bias = bool(fields.get("attention_bias"))
    num_labels, head = _read_head(raw.architecture, fields)
    return DecoderConfig(
        architecture=raw.architecture,
        vocab_size=int(fields["vocab_size"]),
        max_context=min(rope.context(positions) for rope in ropes),
        num_labels=num_labels,
        eos=raw.eos,
        extra=raw.extra,
        attention=attention,
        num_layers=len(layers),
        hidden_size=hidden_size,
        intermediate=int(fields["intermediate_size"]),
        norm_eps=float(fields["rms_norm_eps"]),
        norm_offset=1.0 if family.is_gemma or delta else 0.0,
        post_norms=family.is_gemma,
        activation=_read_activation(fields, is_gemma=family.is_gemma),
        embedding_scale=hidden_size**0.5 if family.is_gemma else 1.0,
        logit_softcap=_read_softcap(fields, "final_logit_softcapping"),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias or prefix == "Qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias")),
        head=head,
        tied=bool(fields.get("tie_word_embeddings", False)),
        fused=family.fused,
        ropes=ropes,
        experts=_read_experts(prefix, fields, len(layers)),
        delta=delta,
        delta_layers=delta_layers,
        states=(delta.state,) * len(delta_layers) if delta else (),
    )


def _read_attention(prefix: str, family: _Family, fields: dict[str, Any]) -> tuple[LayerAttentionConfig, ...]:
    num_layers, heads = int(fields["num_hidden_layers"]), int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    head_dim = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
    if min(num_layers, int(fields["hidden_size"]), heads, kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise EngineError(
            f"{num_layers} layers of {heads} heads of {head_dim} on {kv_heads} key-value heads are no decoder's shape"
        )
    window = _read_window(prefix, fields)
    scale = float(fields["query_pre_attn_scalar"] if family.is_gemma else head_dim) ** -0.5
    softcap = _read_softcap(fields, "attn_logit_softcapping")
    full = LayerAttentionConfig(heads, kv_heads, head_dim, scale, softcap=softcap)
    sliding = replace(full, window=window)
    if family.delta is not None:
        return (full,) * num_layers
    return tuple(
        sliding if kind == _SLIDING else full for kind in _read_layer_types(prefix, fields, num_layers, window)
    )


def _read_ropes(
    prefix: str, family: _Family, fields: dict[str, Any], attention: tuple[LayerAttentionConfig, ...]
) -> tuple[Rope, ...]:
    head_dim = attention[0].head_dim
    if prefix == "Gemma3":
        by_type = read_ropes_by_layer_type(fields, head_dim)
        return tuple(by_type[_FULL if layer.window is None else _SLIDING] for layer in attention)
    if family.delta is not None:
        # The sections are those of images: the three positions of a text's token are the same.
        settings = {
            name: value for name, value in (fields.get("rope_parameters") or {}).items() if name not in _SECTIONS
        }
        fields = fields | {"rope_parameters": settings}
    is_partial = prefix == "Phi3" or family.delta is not None
    return (read_rope(fields, head_dim, theta=family.rope_theta, partial=is_partial),) * len(attention)


def _read_head(architecture: str, fields: dict[str, Any]) -> tuple[int, Head]:
    """Return the number of labels (0 for a language model) and the head."""
    if architecture in _REWARD_HEADS:
        return _REWARD_HEADS[architecture]
    kind = _split(architecture)[1]
    if kind == "CausalLM":
        return 0, Head(("lm_head",), bias=False)
    # transformers leaves the label map out if there are the default two.
    num_labels = len(fields.get("id2label") or range(fields.get("num_labels", 2)))
    bias = kind == "TokenClassification" and bool(fields.get("token_classification_bias", True))
    return num_labels, Head(("score",), bias=bias)


def _read_mixers(fields: dict[str, Any], num_layers: int) -> list[str]:
    """Return for each layer of a hybrid model whether it has attention or a delta rule."""
    interval = int(fields["full_attention_interval"])
    types = fields.get("layer_types") or [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    types = ["linear_attention" if kind == "mamba" else str(kind) for kind in types]
    if len(types) != num_layers or not set(types) <= {_LINEAR, _FULL} or _FULL not in types:
        raise EngineError(f"layer_types must be {num_layers} of {_LINEAR!r} and {_FULL!r}, with both, but is {types}")
    return types


def _read_window(prefix: str, fields: dict[str, Any]) -> int | None:
    """Return the length of the sliding window, if any layer may have one."""
    window = fields.get("sliding_window")
    if prefix.startswith("Qwen") and not fields.get("use_sliding_window"):
        window = None
    if prefix == "Qwen3Moe" and window is not None and fields.get("max_window_layers"):
        # transformers then gives the window to all layers, which contradicts the field.
        raise UnsupportedField("max_window_layers with use_sliding_window is not supported for this architecture")
    if window is not None and int(window) < 1:
        raise EngineError(f"sliding_window is {window}; it must be 1 or more")
    return None if window is None else int(window)


def _read_layer_types(prefix: str, fields: dict[str, Any], num_layers: int, window: int | None) -> list[str]:
    """Return for each layer whether it sees all keys or a sliding window."""
    types = fields.get("layer_types")
    if types is None:
        types = _default_layer_types(prefix, fields, num_layers, window)
    if len(types) != num_layers:
        raise EngineError(f"layer_types must be {num_layers} of {_FULL!r} and {_SLIDING!r}, but is {types}")
    if others := set(types) - {_FULL, _SLIDING}:
        raise UnsupportedField(f"layer_types has {', '.join(sorted(map(str, others)))}, which is not supported")
    if _SLIDING in types and window is None:
        raise EngineError("layer_types asks for sliding_attention, but there is no sliding_window")
    return list(types)


def _default_layer_types(prefix: str, fields: dict[str, Any], num_layers: int, window: int | None) -> list[str]:
    """Return the layer types that transformers derives from older fields."""
    if prefix in ("Qwen2", "Qwen3"):
        first = num_layers if window is None else int(fields.get("max_window_layers", 28))
        return [_FULL if layer < first else _SLIDING for layer in range(num_layers)]
    if prefix in ("Gemma2", "Gemma3"):
        # Every second layer of Gemma 2 sees all keys, every sixth of Gemma 3.
        period = 2
        if prefix == "Gemma3":
            period = int(fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 6)
        return [_SLIDING if (layer + 1) % period else _FULL for layer in range(num_layers)]
    return [_FULL if window is None else _SLIDING] * num_layers


def _read_activation(fields: dict[str, Any], *, is_gemma: bool) -> str:
    supported = "gelu_pytorch_tanh" if is_gemma else "silu"
    # Gemma's configs have both names; only the first is used, so the second must not contradict it.
    for name in ("hidden_activation", "hidden_act") if is_gemma else ("hidden_act",):
        if fields.get(name, supported) != supported:
            raise UnsupportedField(f"{name} {fields[name]!r} is not supported; supported is {supported!r}")
    return supported


def _read_experts(prefix: str, fields: dict[str, Any], num_layers: int) -> ExpertsConfig | None:
    if prefix == "Mixtral":
        sparse_layers = list(range(num_layers))
        router, names, intermediate = "block_sparse_moe", ("w1", "w3", "w2"), fields["intermediate_size"]
    elif prefix in ("Qwen3Moe", "Qwen3Next", "Qwen3_5Moe"):
        dense, step = set(fields.get("mlp_only_layers") or ()), int(fields.get("decoder_sparse_step", 1))
        sparse_layers = [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]
        router, names, intermediate = "mlp", ("gate_proj", "up_proj", "down_proj"), fields["moe_intermediate_size"]
    else:
        return None
    num_experts = int(fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"])
    per_token = int(fields["num_experts_per_tok"])
    if not 1 <= per_token <= num_experts:
        raise EngineError(f"num_experts_per_tok is {per_token}; it must be 1 to the number of experts, {num_experts}")
    return ExpertsConfig(
        layers=frozenset(sparse_layers),
        num_experts=num_experts,
        per_token=per_token,
        intermediate=int(intermediate),
        is_normalized=prefix == "Mixtral" or bool(fields.get("norm_topk_prob", prefix != "Qwen3Moe")),
        router=router,
        names=names,
        shared_intermediate=int(fields.get("shared_expert_intermediate_size") or 0),
    )


def _read_softcap(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is not None and not float(value) > 0:
        raise EngineError(f"{name} is {value}; it must be more than 0, or null")
    return None if value is None else float(value)


def _split(architecture: str) -> tuple[str, str]:
    """Return the family's prefix and the task of a class name, such as ``Qwen2`` and ``CausalLM``."""
    prefix, _, kind = architecture.partition("For")
    return prefix, kind
