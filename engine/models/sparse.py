"""Decoders with sparse attention over latents: DeepSeek-V3.2 and GLM-5, a plain reference on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.layer import FusedAttentionBackend
from engine.attention.sparse import IndexQueries, SparseAttention
from engine.device import DeviceConfig
from engine.models.families.config import DecoderConfig
from engine.models.latent import NORM_EPS, LatentBuilder, LatentDecoder, LatentLayer
from engine.protocol.types import EngineError
from engine.weights.formats.registry import MatrixReader
from engine.weights.safetensors import Weights
from kernels.common.quantization import Rows
from kernels.common.rotary import rotary
from kernels.layers.norm import rms_norm
from kernels.linear.fp32 import Product

_KEY_NORM_EPS = 1e-6
"""``eps`` of the norm of the indexer's keys, as in transformers."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """The projections of a layer's indexer."""

    queries: Product
    """``[heads * head_dim, query_rank]``."""
    keys: Product
    """``[head_dim, hidden]``."""
    weights: Product
    """``[heads, hidden]``."""
    key_norm: tuple[Tensor, Tensor]
    """Weight and bias ``[head_dim]`` of a layer norm."""


@dataclass(frozen=True, slots=True)
class SparseLayer(LatentLayer):
    """A layer whose queries see the tokens that its indexer chooses, or that the one of an earlier layer has chosen."""

    indexer: Indexer | None

    def project(self, hidden: Tensor, normed: Rows | None = None) -> Tensor:
        """Return the vectors of attention, then the indexer's queries and, in the last one, the weights of its heads:
        ``[tokens, heads + 1 + index_heads + 1, cached]``."""
        sizes = self.sizes
        assert sizes.indexer is not None
        heads, dim = sizes.heads, sizes.indexer.head_dim
        out = torch.zeros(len(hidden), heads + 2 + sizes.indexer.heads, sizes.cached)
        latents = self.write_vectors(out[:, : heads + 1, :-dim], self._project(hidden, normed))
        if self.indexer is not None:
            assert latents is not None
            assert self.query_norm is not None
            read_queries, read_keys, read_weights = self.indexer.queries, self.indexer.keys, self.indexer.weights
            keys, weights = (
                product(self._normalize(hidden, self.input_norm, product.quantization))
                for product in (read_keys, read_weights)
            )
            keys = F.layer_norm(keys, (dim,), *self.indexer.key_norm, _KEY_NORM_EPS)
            queries = read_queries(rms_norm(latents, self.query_norm, NORM_EPS, read_queries.quantization))
            out[:, heads, -dim:] = self._place_pairs(keys)
            out[:, heads + 1 : -1, -dim:] = self._place_pairs(queries.view(len(hidden), -1, dim))
            out[:, -1, : sizes.indexer.heads] = weights
        return out

    def _place_pairs(self, x: Tensor) -> Tensor:
        """Return the indexer's vectors ``[…, head_dim]`` with dimensions that are rotated together half of them
        apart."""
        assert self.sizes.indexer is not None
        if not self.sizes.indexer.is_interleaved:
            return x
        rotated, plain = x.tensor_split((self.sizes.rotated,), dim=-1)
        pairs = rotated.reshape(*rotated.shape[:-1], -1, 2).transpose(-1, -2)
        return torch.cat((pairs.reshape(rotated.shape), plain), dim=-1)

    def attend(self, qkv: Tensor, angles: Sequence[Tensor], attend: FusedAttentionBackend) -> Tensor:
        assert isinstance(attend, SparseAttention)
        assert self.sizes.indexer is not None
        heads, dim = self.sizes.heads, self.sizes.indexer.head_dim
        if self.indexer is None:
            attend.index = None
        else:
            rotated = rotary(qkv[:, heads:-1, -dim:], *angles)
            qkv[:, heads, -dim:] = rotated[:, 0]
            attend.index = IndexQueries(rotated[:, 1:], qkv[:, -1, : self.sizes.indexer.heads])
        return LatentLayer.attend(self, qkv[:, : heads + 1].contiguous(), angles, attend)


class SparseBuilder(LatentBuilder):
    """Builds layers with sparse attention."""

    def layer(self, index: int) -> SparseLayer:
        layer = super().layer(index)
        return SparseLayer(
            **{field.name: getattr(layer, field.name) for field in fields(layer)}, indexer=self._indexer(index)
        )

    def prediction_layer(self, prefix: str) -> LatentLayer:
        raise EngineError(f"{prefix}: a layer for multi-token prediction with an indexer is not supported as a drafter")

    def _indexer(self, index: int) -> Indexer | None:
        sizes, prefix = self._config.latent, f"model.layers.{index}.self_attn.indexer."
        assert sizes is not None
        assert sizes.indexer is not None
        assert sizes.query_rank is not None
        heads, dim, hidden = sizes.indexer.heads, sizes.indexer.head_dim, self._config.hidden_size
        if index not in sizes.indexer.layers:
            return None
        return Indexer(
            queries=self.linear(f"{prefix}wq_b", heads * dim, sizes.query_rank, bias=False),
            keys=self.linear(f"{prefix}wk", dim, hidden, bias=False),
            weights=self.linear(f"{prefix}weights_proj", heads, hidden, bias=False),
            key_norm=(
                self._weights.take(f"{prefix}k_norm.weight", dim),
                self._weights.take(f"{prefix}k_norm.bias", dim),
            ),
        )


class SparseDecoder(LatentDecoder):
    """A ``Model`` with sparse attention. Its steps are not recorded: operators of torch choose the tokens."""

    is_recordable = False

    def create_builder(
        self, config: DecoderConfig, weights: Weights, read: MatrixReader, device_config: DeviceConfig
    ) -> LatentBuilder:
        return SparseBuilder(config, weights, read, device_config)
