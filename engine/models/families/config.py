"""The sizes and switches of a decoder that is defined here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.models.config import ModelConfig
from engine.models.delta_config import DeltaConfig
from engine.models.families.gemma4 import Gemma4Config
from engine.models.families.mamba import MambaConfig
from engine.models.latent_config import LatentConfig
from engine.models.rope import Rope
from engine.models.routing import RoutingConfig


class Clamp(NamedTuple):
    """Constants of ``clamped_silu_mul``."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538) as feed-forward layers."""

    layers: frozenset[int]
    """Indices of the layers with experts; the others are dense."""
    num_experts: int
    routing: RoutingConfig
    intermediate: int
    router: str
    """Name of the module in a layer that holds the router and the experts."""
    names: tuple[str, str, str]
    """Names of an expert's gate, up and down projections."""
    shared_intermediate: int = 0
    """Size of the expert that every token is routed to, if there is one."""
    clamp: Clamp | None = None
    """Constants of gpt-oss's activation, if the experts have it."""
    shared_name: str = "shared_expert"
    """Name of its module."""
    has_shared_gate: bool = True
    """True if it is weighted by a gate."""
    has_correction: bool = False
    """True if the router has a number for each expert that is added to its score for the choice alone."""
    latent: int | None = None
    """Width to which the inputs of the experts are projected, and from which their results are projected back."""


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
    pre_norms: bool
    """Normalise the inputs of attention and feed-forward."""
    post_norms: bool
    """Normalise the outputs of attention and feed-forward before adding them."""
    activation: str
    embedding_scale: float
    logit_softcap: float | None
    """Logits become ``softcap * tanh(logits / softcap)``."""
    qk_norm: Literal["head", "projection"] | None
    """Normalise queries and keys, each head or all of a token's heads together."""
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
    convolution_width: int | None = None
    """Tokens that the layers with a short convolution read, if there are such layers."""
    state_layers: frozenset[int] = frozenset()
    """Layers with a delta rule, a short convolution or Mamba-2, most of them instead of attention."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    gemma4: Gemma4Config | None = None
    """Sizes and switches of Gemma 4."""
    has_sinks: bool = False
    """Attention has a learned logit without a value for each query head."""
    latent: LatentConfig | None = None
    """Sizes of multi-head latent attention, if the layers have it."""
    mamba: MambaConfig | None = None
    """Sizes of the layers with Mamba-2, and the kinds of all layers, of a family that has such layers."""
    mamba_names: Literal["granite", "bamba", "single"] | None = None
    """The names of the tensors of such a family."""

    @property
    def recurrent_part(self) -> str | None:
        """The part of the model by which it differs from decoders whose layers all have attention, if there is one."""
        if self.states:
            return "recurrent layers"
        return None if self.mamba is None else "layers of a family that has recurrent ones"

    @property
    def cpu_only_part(self) -> str | None:
        """The part of the model that no kernel of a GPU computes, if there is one."""
        if self.latent is not None and self.latent.indexer is not None:
            return "sparse attention (vLLM computes it on GPUs)"
        return None

    @property
    def unquantizable_part(self) -> str | None:
        """The part of the model that ``reasoner quantize`` does not know, if there is one."""
        if self.recurrent_part is not None or self.cpu_only_part is not None:
            return self.recurrent_part or self.cpu_only_part
        if self.latent is not None:
            return "latents in place of keys"
        if self.gemma4 is not None:
            return "heads that differ by layer"
        return "attention sinks" if self.has_sinks else None
