"""Read from a config what the layers of an architecture consist of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.attention.layer import LayerAttentionConfig
from engine.cache.state_layers import StateLayer
from engine.models.delta_config import DeltaConfig, read_delta
from engine.models.families.config import ExpertsConfig
from engine.models.families.experts import read_experts, read_grouped_experts
from engine.models.families.gemma4 import Gemma4Config, read_gemma4
from engine.models.families.layers import (
    list_types,
    read_attention,
    read_latent_attention,
    read_latent_ropes,
    read_ropes,
    read_state_layers,
)
from engine.models.families.mamba import MambaConfig, read_mamba
from engine.models.families.mamba_parts import read_mamba_attention, read_mamba_experts, read_mamba_ropes
from engine.models.families.table import Family
from engine.models.latent_config import LatentConfig, read_latent
from engine.models.rope import Rope
from engine.protocol.types import EngineError


@dataclass(frozen=True, slots=True)
class Parts:
    """Fields of ``DecoderConfig``, which describes them."""

    num_layers: int
    attention: tuple[LayerAttentionConfig, ...]
    ropes: tuple[Rope, ...]
    experts: ExpertsConfig | None
    states: tuple[StateLayer, ...] = ()
    state_layers: frozenset[int] = frozenset()
    delta: DeltaConfig | None = None
    convolution_width: int | None = None
    latent: LatentConfig | None = None
    mamba: MambaConfig | None = None
    gemma4: Gemma4Config | None = None


def read_parts(prefix: str, family: Family, fields: dict[str, Any]) -> Parts:
    """Return the parts. Raises ``EngineError`` for sizes that do not fit together."""
    if family.mamba is not None:
        return _read_mamba_parts(prefix, family, fields)
    if family.has_latents:
        return _read_latent_parts(prefix, family, fields)
    if prefix == "Gemma4":
        return _read_gemma4_parts(prefix, family, fields)
    layers = read_attention(prefix, family, fields)
    delta = None if family.delta is None else read_delta(fields, is_interleaved=family.delta == "interleaved")
    width = _read_convolution_width(fields) if family.has_convolutions else None
    state_layers = read_state_layers(family, fields, len(layers))
    attention = tuple(layer for index, layer in enumerate(layers) if index not in state_layers)
    state = delta.state if delta else StateLayer((((width or 1) - 1, int(fields["hidden_size"])),))
    return Parts(
        num_layers=len(layers),
        attention=attention,
        ropes=read_ropes(prefix, family, fields, attention),
        experts=read_experts(prefix, fields, len(layers)),
        states=(state,) * len(state_layers),
        state_layers=state_layers,
        delta=delta,
        convolution_width=width,
    )


def _read_latent_parts(prefix: str, family: Family, fields: dict[str, Any]) -> Parts:
    latent = read_latent(fields, is_interleaved=True, indexer_is_interleaved=family.indexer_is_interleaved)
    attention = read_latent_attention(latent, fields)
    return Parts(
        num_layers=len(attention),
        attention=attention,
        ropes=read_latent_ropes(latent, family, fields),
        experts=read_grouped_experts(prefix, fields, len(attention)),
        latent=latent,
    )


def _read_gemma4_parts(prefix: str, family: Family, fields: dict[str, Any]) -> Parts:
    layers = read_attention(prefix, family, fields)
    gemma4 = read_gemma4(fields, layers, list_types(layers))
    return Parts(
        num_layers=len(layers),
        attention=tuple(layer for layer, source in zip(layers, gemma4.sources, strict=True) if source is None),
        ropes=read_ropes(prefix, family, fields, layers),
        experts=read_experts(prefix, fields, len(layers)),
        gemma4=gemma4,
    )


def _read_mamba_parts(prefix: str, family: Family, fields: dict[str, Any]) -> Parts:
    mamba = read_mamba(prefix, fields)
    attention = read_mamba_attention(prefix, family, fields, mamba)
    return Parts(
        num_layers=len(mamba.kinds),
        attention=attention,
        ropes=read_mamba_ropes(prefix, family, fields, attention),
        experts=read_mamba_experts(prefix, fields, mamba),
        states=(mamba.state,) * len(mamba.state_layers),
        state_layers=mamba.state_layers,
        mamba=mamba,
    )


def _read_convolution_width(fields: dict[str, Any]) -> int:
    width = int(fields["conv_L_cache"])
    if width < 2:
        raise EngineError(f"conv_L_cache is {width}; it must be 2 or more")
    return width
