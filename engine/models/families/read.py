"""Read a ``config.json`` into a ``DecoderConfig``."""

from __future__ import annotations

from typing import Any

from engine.models.config import RawConfig, name_bad_fields
from engine.models.config_fields import READ, WITHOUT_INFLUENCE, UnsupportedField, refuse_unknown
from engine.models.families.config import DecoderConfig, Head
from engine.models.families.layers import read_multiplier, read_scales, read_softcap
from engine.models.families.parts import Parts, read_parts
from engine.models.families.table import FAMILIES, REWARD_HEADS, Family
from engine.protocol.types import EngineError


def is_defined(architecture: str) -> bool:
    """Return True if ``decoder_config`` supports the architecture."""
    prefix, kind = _split(architecture)
    if prefix not in FAMILIES:
        return False
    classifier = kind in ("TokenClassification", "SequenceClassification") and FAMILIES[prefix].delta is None
    return kind == "CausalLM" or architecture in REWARD_HEADS or (classifier and FAMILIES[prefix].has_classifiers)


def known_fields(architecture: str) -> set[str]:
    """Return the fields that a config of a defined architecture may have with any value."""
    return READ | WITHOUT_INFLUENCE | FAMILIES[_split(architecture)[0]].extra_fields


def decoder_config(raw: RawConfig) -> DecoderConfig:
    """Read a config. Raises ``UnsupportedField`` if it asks for a feature that is not computed here, and another
    ``EngineError`` if it lacks a field or has one without meaning.
    """
    with name_bad_fields(raw.folder / "config.json"):
        try:
            return _read_config(raw)
        except EngineError as error:
            raise type(error)(f"{raw.folder}: {error}") from None


def _read_config(raw: RawConfig) -> DecoderConfig:
    prefix, _ = _split(raw.architecture)
    family = FAMILIES[prefix]
    fields = _complete_fields(raw, family)
    hidden_size, positions = int(fields["hidden_size"]), int(fields["max_position_embeddings"])
    if positions < 1:
        raise EngineError(f"max_position_embeddings is {positions}; it must be 1 or more")
    parts = read_parts(prefix, family, fields)
    attention_bias = bool(fields.get("attention_bias"))
    num_labels, head = _read_head(raw.architecture, fields)
    # The norms of hidden states scaled by ``1 / residual`` are the same with a smaller ``eps``, and no output of a part
    # has to be multiplied.
    residual = read_multiplier(fields, "residual_multiplier")
    embedding_scale, logit_scale = read_scales(fields)
    if family.is_gemma:
        embedding_scale = hidden_size**0.5
    return DecoderConfig(
        architecture=raw.architecture,
        vocab_size=int(fields["vocab_size"]),
        max_context=min((rope.context(positions) for rope in parts.ropes), default=positions),
        num_labels=num_labels,
        eos=raw.eos,
        extra=raw.extra,
        attention=parts.attention,
        num_layers=parts.num_layers,
        hidden_size=hidden_size,
        intermediate=_read_intermediate(family, fields, parts),
        norm_eps=float(fields["rms_norm_eps"]) / residual**2,
        norm_offset=family.norm_offset,
        pre_norms=family.norms != "after",
        post_norms=family.norms != "before",
        activation=_read_activation(fields, is_gemma=family.is_gemma),
        embedding_scale=embedding_scale / residual,
        logit_softcap=read_softcap(fields, "final_logit_softcapping"),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias or prefix == "Qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias")),
        head=head,
        tied=bool(fields.get("tie_word_embeddings", False)),
        fused=family.fused,
        ropes=parts.ropes,
        experts=parts.experts,
        delta=parts.delta,
        convolution_width=parts.convolution_width,
        gemma4=parts.gemma4,
        state_layers=parts.state_layers,
        logit_scale=logit_scale,
        has_sinks=family.has_sinks,
        latent=parts.latent,
        hidden_scale=residual,
        mamba=parts.mamba,
        mamba_names=family.mamba,
        states=parts.states,
    )


def _complete_fields(raw: RawConfig, family: Family) -> dict[str, Any]:
    """Return the fields with the family's defaults. Raises ``UnsupportedField`` for one that it does not have."""
    known = known_fields(raw.architecture)
    left_out = {name: value for name, value in raw.defaults.items() if name in known and value is not None}
    fields = family.defaults | left_out | raw.fields
    refuse_unknown(fields, known)
    fields |= {name: fields[alias] for alias, name in family.aliases.items() if alias in fields}
    if fields.get("rope_parameters") is None and "rope_parameters" in family.defaults:
        fields["rope_parameters"] = family.defaults["rope_parameters"]
    return fields


def _read_intermediate(family: Family, fields: dict[str, Any], parts: Parts) -> int:
    """Return the width of a feed-forward part; LFM2's configs give one and a half times it, before it is rounded up.

    Of Granite 4 it is that of the part that is there beside experts, and alone without them. A model whose layers all
    have experts may have none.
    """
    if "intermediate_size" not in fields and parts.experts and len(parts.experts.layers) == parts.num_layers:
        return 0
    size = int(fields["shared_intermediate_size" if family.mamba == "granite" else "intermediate_size"])
    if family.has_convolutions and fields["block_auto_adjust_ff_dim"]:
        size = int(2 * size / 3)
        if fields["block_ffn_dim_multiplier"] is not None:
            multiple = int(fields["block_multiple_of"])
            size = -(-int(float(fields["block_ffn_dim_multiplier"]) * size) // multiple) * multiple
    return size


def _read_head(architecture: str, fields: dict[str, Any]) -> tuple[int, Head]:
    """Return the number of labels (0 for a language model) and the head."""
    if architecture in REWARD_HEADS:
        return REWARD_HEADS[architecture]
    kind = _split(architecture)[1]
    if kind == "CausalLM":
        return 0, Head(("lm_head",), bias=False)
    # transformers leaves the label map out if there are the default two.
    num_labels = len(fields.get("id2label") or range(fields.get("num_labels", 2)))
    bias = kind == "TokenClassification" and bool(fields.get("token_classification_bias", True))
    return num_labels, Head(("score",), bias=bias)


def _read_activation(fields: dict[str, Any], *, is_gemma: bool) -> str:
    supported = "gelu_pytorch_tanh" if is_gemma else "silu"
    # Gemma's configs have both names; only the first is used, so the second must not contradict it.
    for name in ("hidden_activation", "hidden_act") if is_gemma else ("hidden_act",):
        if fields.get(name, supported) != supported:
            raise UnsupportedField(f"{name} {fields[name]!r} is not supported; supported is {supported!r}")
    return supported


def _split(architecture: str) -> tuple[str, str]:
    """Return the family's prefix and the task of a class name, such as ``Qwen2`` and ``CausalLM``."""
    prefix, _, kind = architecture.partition("For")
    return prefix, kind
