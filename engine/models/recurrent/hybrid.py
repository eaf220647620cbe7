"""Decoders in which most layers keep a state instead of keys.

Those of Qwen3-Next and Qwen3.5 have a gated delta rule, those of LFM2 a short convolution (``short_convolution``). In
the former, attention layers are gated: each query head has a gate, which is projected together with the query. Every
layer ends like those of other decoders, so that products, weight formats and experts are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.cache.state_layers import LayerStates
from engine.device import DeviceConfig
from engine.models.decoder import Decoder, Layer, LayerBuilder, PredictionNames
from engine.models.delta_config import DeltaConfig
from engine.models.families.config import DecoderConfig
from engine.models.recurrent.short_convolution import ConvolutionBuilder, ConvolutionLayer
from engine.weights.formats.registry import MatrixReader
from engine.weights.safetensors import Weights
from kernels.common.quantization import Rows
from kernels.layers.activation import silu_gate
from kernels.layers.elementwise import concatenate, contiguous
from kernels.layers.gate import sigmoid_mul
from kernels.layers.norm import rms_norm
from kernels.recurrent.convolution import causal_convolution
from kernels.recurrent.gated_delta import delta_gates, gated_delta

PREDICTION_NAMES = PredictionNames(
    "mtp.",
    "mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    fuse="mtp.fc",
    layer="mtp.layers.0.",
    final_norm="mtp.norm",
)


@dataclass(frozen=True, slots=True)
class GatedAttentionLayer(Layer):
    """A layer with attention whose output is gated."""

    def attend(self, qkv: Tensor, angles: Sequence[Tensor], attend: FusedAttentionBackend) -> Tensor:
        """Return the gated attention ``[tokens, heads * head_dim]``."""
        heads, dim = self.config.heads, self.config.head_dim
        # For each query head its query and its gate, then keys and values.
        queries = qkv[:, : 2 * heads].view(len(qkv), heads, 2, dim)
        out = Layer.attend(self, concatenate((queries[:, :, 0], qkv[:, 2 * heads :])), angles, attend)
        return sigmoid_mul(contiguous(queries[:, :, 1]).view(out.shape), out)


@dataclass(frozen=True, slots=True)
class DeltaLayer(Layer):
    """A layer with a gated delta rule. ``qkv`` projects queries, keys, values, gates ``z``, and ``b`` and ``a``."""

    sizes: DeltaConfig
    filters: Tensor
    """``[width, channels]``."""
    rates: Tensor
    """``[value_heads]``, negative: factors of a token's decay."""
    rate_bias: Tensor
    """``[value_heads]``."""
    gate_norm: Tensor
    """``[value_dim]``."""

    def project(self, hidden: Tensor, normed: Rows | None = None) -> Tensor:
        """Return the projections ``[tokens, …]``, the rows of ``qkv``."""
        return self._project(hidden, normed)

    def mix_states(self, rows: Tensor, states: LayerStates) -> Tensor:
        """Return the output ``[tokens, value_heads * value_dim]`` of projections, and write the layer's states after
        the tokens."""
        sizes, tokens = self.sizes, len(rows)
        channels, z, b, a = _split(rows, sizes)
        history, matrices = states.layers[self.index]
        mixed = causal_convolution(channels, self.filters, history, states.segments, activate=True)
        keys = sizes.key_heads * sizes.key_dim
        q, k = mixed[:, :keys], mixed[:, keys : 2 * keys]
        key_heads = sizes.key_heads
        if sizes.has_tiled_values and sizes.value_heads > key_heads:
            q, k = (concatenate([part] * (sizes.value_heads // key_heads)) for part in (q, k))
            key_heads = sizes.value_heads
        q, k = q.view(tokens, key_heads, -1), k.view(tokens, key_heads, -1)
        v = mixed[:, 2 * keys :].view(tokens, sizes.value_heads, -1)
        gates = delta_gates(a, b, self.rates, self.rate_bias)
        out = gated_delta(q, k, v, *gates, matrices, states.segments, in_chunks=states.in_chunks)
        return silu_gate(z, rms_norm(out, self.gate_norm, self.config.norm_eps).flatten(1))


def _split(rows: Tensor, sizes: DeltaConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the channels of the convolution, ``z``, ``b`` and ``a`` of a layer's projections ``[tokens, …]``."""
    values, heads = sizes.value_heads * sizes.value_dim, sizes.value_heads
    tokens, per_key = len(rows), heads // sizes.key_heads
    wide, narrow = torch.split(rows, [sizes.channels + values, 2 * heads], dim=1)
    if sizes.are_rates_interleaved:
        b, a = (
            contiguous(part).view(tokens, -1)
            for part in torch.split(narrow.view(tokens, sizes.key_heads, -1), [per_key, per_key], dim=2)
        )
    else:
        b, a = torch.split(narrow, [heads, heads], dim=1)
    if not sizes.is_interleaved:
        channels, z = torch.split(wide, [sizes.channels, values], dim=1)
        return channels, z, b, a
    widths = [sizes.key_dim, sizes.key_dim, per_key * sizes.value_dim, per_key * sizes.value_dim]
    q, k, v, z = (
        contiguous(part).view(tokens, -1) for part in torch.split(wide.view(tokens, sizes.key_heads, -1), widths, dim=2)
    )
    return concatenate((q, k, v)), z, b, a


class HybridBuilder(LayerBuilder):
    """Builds the layers of both kinds."""

    prediction_names = PREDICTION_NAMES

    def layer(self, index: int) -> Layer:
        is_delta = index in self._config.state_layers
        place = sum((other in self._config.state_layers) == is_delta for other in range(index))
        return self._layer(f"model.layers.{index}.", index, place=place, is_delta=is_delta)

    def prediction_layer(self, prefix: str) -> Layer:
        return self._layer(prefix, self._config.num_layers - 1, place=0, is_delta=False)

    def _layer(self, prefix: str, index: int, *, place: int, is_delta: bool) -> Layer:
        """Return the layer with these names. ``index``: of the layer whose kind of feed-forward part it has; ``place``:
        among the layers of its kind."""
        config = self._config
        assert config.delta is not None
        attention = f"{prefix}linear_attn." if is_delta else f"{prefix}self_attn."
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        sizes = self._find_sizes(attention, config.delta)
        parts = sizes.projections if is_delta else {"q_proj": 2 * query, "k_proj": key, "v_proj": key}
        width = config.delta.value_heads * config.delta.value_dim if is_delta else query
        common: dict[str, Any] = {
            "config": config,
            "index": place,
            "input_norm": self.norm(f"{prefix}input_layernorm"),
            "qkv": self.product(
                {attention + name: rows for name, rows in parts.items()},
                config.hidden_size,
                bias=config.qkv_bias and not is_delta,
            ),
            "qk_norm": None if is_delta else self._qk_norm(attention),
            "projection_norms": None,
            "output": self.linear(
                f"{attention}{'out_proj' if is_delta else 'o_proj'}", config.hidden_size, width, bias=False
            ),
            "output_norm": None,
            "mlp_norm": self.norm(f"{prefix}post_attention_layernorm"),
            "mlp": self.feed_forward(prefix, index),
            "mlp_output_norm": None,
            "fuses_norms": False,
        }
        return DeltaLayer(**common, **self._delta(attention, sizes)) if is_delta else GatedAttentionLayer(**common)

    def _find_sizes(self, prefix: str, sizes: DeltaConfig) -> DeltaConfig:
        """Return the sizes with the order of rows and heads that the weights have, which in a GGUF file is another."""
        is_apart = self._weights.has(f"{prefix}in_proj_z.weight")
        return replace(
            sizes,
            is_interleaved=sizes.is_interleaved and not is_apart,
            has_tiled_values=self._weights.has_tiled_values,
        )

    def _delta(self, prefix: str, sizes: DeltaConfig) -> dict[str, Any]:
        """Return what a layer with a delta rule has besides its projections."""
        if self._weights.has(f"{prefix}A"):
            rates = self.constant(f"{prefix}A", sizes.value_heads)
        else:
            rates = -self.constant(f"{prefix}A_log", sizes.value_heads).exp()
        filters = self.constant(f"{prefix}conv1d.weight", sizes.channels, 1, sizes.width)
        return {
            "sizes": sizes,
            "filters": filters[:, 0].T.contiguous(),
            "rates": rates,
            "rate_bias": self.constant(f"{prefix}dt_bias", sizes.value_heads),
            "gate_norm": self.constant(f"{prefix}norm.weight", sizes.value_dim),
        }


class HybridDecoder(Decoder):
    """A ``Model`` with layers of both kinds."""

    def create_builder(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig
    ) -> LayerBuilder:
        if config.convolution_width is not None:
            return ConvolutionBuilder(config, weights, read, device_config)
        return HybridBuilder(config, weights, read, device_config)

    def attend(
        self,
        index: int,
        qkv: Tensor,
        angles: Sequence[Tensor],
        attend: FusedAttentionBackend,
        states: LayerStates | None = None,
    ) -> Tensor:
        """Return the output of a layer's attention, or of what it has in place of it, and write its states."""
        layer = self._layers[index]
        if isinstance(layer, DeltaLayer | ConvolutionLayer):
            assert states is not None
            return layer.mix_states(qkv, states)
        return layer.attend(qkv, angles[self._tables_of[layer.index]], attend)
