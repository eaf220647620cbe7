"""Decoders with multi-head latent attention: DeepSeek-V2 and V3, and GLM-4.7-Flash.

Keys and values of the heads are never computed. A score is ``q · (W c)`` with the head's matrix ``W`` and a token's
latent ``c``, which is ``(Wᵀ q) · c``: the query is multiplied by the matrix once, not each key. In the same way the
weighted sum of latents is multiplied by the matrix that would make values of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.layer import FusedAttentionBackend
from engine.device import DeviceConfig
from engine.models.decoder import Decoder, Layer, LayerBuilder, PredictionNames
from engine.models.families.config import DecoderConfig
from engine.models.latent_config import LatentConfig
from engine.weights.formats.registry import MatrixReader
from engine.weights.matrix import dense
from engine.weights.safetensors import Weights
from kernels.common.quantization import Rows
from kernels.cpu.availability import can_use_kernels
from kernels.cpu.runtime.recorder import empty
from kernels.layers.elementwise import contiguous, write
from kernels.layers.norm import rms_norm
from kernels.linear.fp32 import Product
from kernels.linear.per_head import HeadProducts

NORM_EPS = 1e-6
"""``eps`` of the norms of latents, whatever the config has for the others, as in transformers."""


@dataclass(frozen=True, slots=True)
class LatentLayer(Layer):
    """A layer with latent attention. ``qkv`` projects the queries, or their latent, and what is cached of a token."""

    sizes: LatentConfig
    latent_norm: Tensor
    """``[rank]``."""
    query_norm: Tensor | None
    """``[query_rank]``."""
    queries: Product | None
    """``[heads * (plain + rotated), query_rank]``."""
    to_latent: HeadProducts
    """From a query's plain part to the latents that it is compared with: ``[heads, plain, rank]``."""
    to_values: HeadProducts
    """``[heads, rank, value_dim]``."""

    @property
    def products(self) -> tuple[Product, ...]:
        own = (self.qkv, self.output) if self.queries is None else (self.qkv, self.queries, self.output)
        return *own, *self.mlp.products

    def project(self, hidden: Tensor, normed: Rows | None = None) -> Tensor:
        """Return a query of each head and what is cached of each token, ``[tokens, heads + 1, rotated + rank]``."""
        shape = len(hidden), self.sizes.heads + 1, self.sizes.cached
        out = empty(*shape) if can_use_kernels(hidden) else hidden.new_empty(shape)
        self.write_vectors(out, self._project(hidden, normed))
        return out

    def write_vectors(self, out: Tensor, rows: Tensor) -> Tensor | None:
        """Write the queries and what is cached ``[tokens, heads + 1, rotated + rank]`` from the layer's projections.

        Returns the queries' latents ``[tokens, query_rank]``, if they have any, not normalised.
        """
        sizes, tokens, query_latents = self.sizes, len(rows), None
        rows, latent, rotated_key = torch.split(
            rows, [rows.shape[1] - sizes.projected, sizes.rank, sizes.rotated], dim=1
        )
        if self.queries is not None and self.query_norm is not None:
            query_latents = contiguous(rows)
            rows = self.queries(rms_norm(query_latents, self.query_norm, NORM_EPS, self.queries.quantization))
        queries = rows.view(tokens, sizes.heads, sizes.plain + sizes.rotated)
        self._write_pairs(out[:, :-1, : sizes.rotated], queries[:, :, sizes.plain :])
        write(out[:, :-1, sizes.rotated :], self.to_latent(queries[:, :, : sizes.plain]))
        self._write_pairs(out[:, -1, : sizes.rotated], rotated_key)
        write(out[:, -1, sizes.rotated :], rms_norm(latent, self.latent_norm, NORM_EPS))
        return query_latents

    def _write_pairs(self, target: Tensor, rotated: Tensor) -> None:
        """Write vectors ``[…, rotated]`` with the dimensions that are rotated together half of them apart."""
        if self.sizes.is_interleaved:
            rotated = rotated.view(*rotated.shape[:-1], -1, 2).transpose(-1, -2)
            target = target.view(*target.shape[:-1], 2, -1)
        write(target, rotated)

    def attend(self, qkv: Tensor, angles: Sequence[Tensor], attend: FusedAttentionBackend) -> Tensor:
        """Return the attention output ``[tokens, heads * value_dim]``."""
        mixed = attend.forward_qkv(self.index, qkv, None, self.config.norm_eps, *angles)
        latents = mixed.view(len(qkv), self.sizes.heads, self.sizes.cached)[
            :, :, self.sizes.rotated : self.sizes.projected
        ]
        return contiguous(self.to_values(latents)).flatten(1)


class LatentBuilder(LayerBuilder):
    """Builds layers with latent attention."""

    @property
    def prediction_names(self) -> PredictionNames:
        layer = f"model.layers.{self._config.num_layers}."
        return PredictionNames(
            layer,
            f"{layer}enorm",
            hidden_norm=f"{layer}hnorm",
            fuse=f"{layer}eh_proj",
            layer=layer,
            final_norm=f"{layer}shared_head.norm",
        )

    def layer(self, index: int) -> LatentLayer:
        return self._layer(f"model.layers.{index}.", index, place=index)

    def prediction_layer(self, prefix: str) -> LatentLayer:
        return self._layer(prefix, self._config.num_layers - 1, place=0)

    def _layer(self, prefix: str, index: int, *, place: int) -> LatentLayer:
        """Return the layer with these names. ``index``: of the layer whose kind of feed-forward part it has; ``place``:
        among the calls of attention."""
        config = self._config
        sizes, attention = config.latent, f"{prefix}self_attn."
        assert sizes is not None
        first = {"q_proj": sizes.query_width} if sizes.query_rank is None else {"q_a_proj": sizes.query_rank}
        to_latent, to_values = self._head_products(attention, sizes)
        parts = first | {"kv_a_proj_with_mqa": sizes.projected}
        return LatentLayer(
            config=config,
            index=place,
            input_norm=self.norm(f"{prefix}input_layernorm"),
            qkv=self.product(
                {attention + name: rows for name, rows in parts.items()}, config.hidden_size, bias=sizes.has_bias
            ),
            qk_norm=None,
            projection_norms=None,
            output=self.linear(
                f"{attention}o_proj", config.hidden_size, sizes.heads * sizes.value_dim, bias=sizes.has_bias
            ),
            output_norm=None,
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm"),
            mlp=self.feed_forward(prefix, index),
            mlp_output_norm=None,
            fuses_norms=self._device_config.uses_gpu_kernels,
            sizes=sizes,
            latent_norm=self.norm(f"{attention}kv_a_layernorm", sizes.rank),
            query_norm=None if sizes.query_rank is None else self.norm(f"{attention}q_a_layernorm", sizes.query_rank),
            queries=None
            if sizes.query_rank is None
            else self.linear(f"{attention}q_b_proj", sizes.query_width, sizes.query_rank, bias=False),
            to_latent=to_latent,
            to_values=to_values,
        )

    def _head_products(self, prefix: str, sizes: LatentConfig) -> tuple[HeadProducts, HeadProducts]:
        """Return the products that make latents of queries, and values of latents."""
        if self._weights.has(f"{prefix}k_b_proj.weight"):  # in a GGUF file, where the first are transposed
            to_keys = self._weights.take(f"{prefix}k_b_proj.weight", sizes.heads, sizes.rank, sizes.plain)
            to_values = self._weights.take(f"{prefix}v_b_proj.weight", sizes.heads, sizes.value_dim, sizes.rank)
            return self._head_product(to_keys.transpose(1, 2)), self._head_product(to_values.transpose(1, 2))
        rows = sizes.heads * (sizes.plain + sizes.value_dim)
        matrix = dense(self._read(self._weights, f"{prefix}kv_b_proj", rows, sizes.rank))
        by_head = matrix.view(sizes.heads, -1, sizes.rank)
        keys, values = by_head[:, : sizes.plain], by_head[:, sizes.plain :]
        return self._head_product(keys), self._head_product(values.transpose(1, 2))

    def _head_product(self, weight: Tensor) -> HeadProducts:
        config = self._device_config
        return HeadProducts(config.convert(weight), is_batch_invariant=config.is_batch_invariant)


class LatentDecoder(Decoder):
    """A ``Model`` with latent attention."""

    def create_builder(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig
    ) -> LayerBuilder:
        return LatentBuilder(config, weights, read, device_config)
