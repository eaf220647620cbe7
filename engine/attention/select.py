"""Select the attention backend of a model on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.attention.cpu_numba import NumbaAttention
from engine.attention.cpu_torch import TorchAttention
from engine.attention.layer import FusedAttentionBackend, LayerAttentionConfig, has_compiled_kernel
from engine.attention.plan import AttentionMetadata
from engine.attention.sparse import SparseAttention


class CpuAttention(FusedAttentionBackend, Protocol):
    """A ``FusedAttentionBackend`` that is prepared for each step."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Plan a step. Every layer's call that follows belongs to it."""
        ...


def create_cpu_attention(
    layers: Sequence[LayerAttentionConfig], kv: Tensor, scales: Tensor | None, *, deterministic: bool = False
) -> CpuAttention:
    """Return the fastest backend that supports the layers.

    ``kv``: ``[layers, kinds, kv_heads, pages, page_size, head_dim]``, keys before values: float32, or
    quantized with ``scales``, see ``KeyPool``. ``deterministic``: a token's result is, bit for
    bit, a function of its sequence alone.
    """
    if layers[0].indexer is not None:
        return SparseAttention(layers, kv, scales, deterministic=deterministic)
    if has_compiled_kernel(layers[0], kv):
        return NumbaAttention(layers, kv, scales, sharing=not deterministic)
    return TorchAttention(layers, kv, scales, deterministic=deterministic)
