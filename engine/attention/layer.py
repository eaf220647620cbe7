"""The interface of attention over the paged cache, the same for every model and device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.quantize import QUANTIZED

_MAX_HEADS_PER_KV = 64
"""Query heads for each key-value head that the compiled kernel has room for."""


class HeadShape(NamedTuple):
    """The sizes of a layer's attention. Layers of the same shape share a pool of keys and values, and kernels."""

    heads: int
    kv_heads: int
    head_dim: int
    has_values: bool = True
    """False if a token has one vector that is its key and its value (``LayerAttentionConfig.is_latent``)."""

    @property
    def num_kinds(self) -> int:
        """Vectors of a token for each key-value head: a key and a value, or one that is both."""
        return 2 if self.has_values else 1


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Sizes of an indexer, which chooses the tokens that each query attends to, see ``engine.attention.sparse``."""

    heads: int
    head_dim: int
    """Numbers of a token's key, which are the last ones of its vector in the cache."""
    top_k: int
    """Tokens that a query attends to, at most."""
    is_interleaved: bool = False
    """True if neighbouring dimensions of its queries and keys are rotated together."""
    layers: frozenset[int] = frozenset()
    """The layers with an indexer; the others attend to the tokens that the one before them has chosen."""


class Span(NamedTuple):
    """The positions that a query sees, see ``LayerAttentionConfig``."""

    window: int | None = None
    chunk: int | None = None

    def first_key(self, position: int) -> int:
        """Return the first position that a query at ``position`` sees."""
        first = 0 if self.window is None else max(position + 1 - self.window, 0)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)


@dataclass(frozen=True, slots=True)
class LayerAttentionConfig:
    """Parameters of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, usually ``head_dim ** -0.5``."""
    window: int | None = None
    """Number of latest keys that a query sees, its own included; ``None``: all."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)`` before the mask (Gemma 2)."""
    chunk: int | None = None
    """Number of positions in a chunk, of which a query sees its own alone (Llama 4); ``None``: all."""
    sinks: Tensor | None = field(default=None, compare=False)
    """``[heads]``, a learned logit that takes part in each softmax and has no value (gpt-oss)."""
    is_latent: bool = False
    """True if each token has one vector that is its key and its value for all query heads, and its first dimensions
    are rotated: the latent of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434). The model
    multiplies queries and results by the matrices that would make keys and values of it."""
    num_values: int | None = None
    """Numbers at the end of such a vector whose results the model reads; ``None``: all of them."""
    indexer: IndexerConfig | None = None
    """The indexer that chooses the tokens that each query attends to; ``None``: it attends to all."""

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.head_dim, has_values=not self.is_latent)

    @property
    def num_vectors(self) -> int:
        """Vectors of a token in a layer's projections: queries, keys, and values that are not the keys."""
        return self.heads + self.shape.num_kinds * self.kv_heads

    @property
    def num_head_groups(self) -> int:
        """Groups of query heads that the compiled kernel attends with apart, each with the keys of one head."""
        if not self.is_latent:
            return self.kv_heads
        return next(groups for groups in range(1, self.heads + 1) if self._can_divide(groups))

    def _can_divide(self, groups: int) -> bool:
        return self.heads % groups == 0 and self.heads // groups <= _MAX_HEADS_PER_KV

    @property
    def span(self) -> Span:
        """The part of the keys that a query sees."""
        return Span(self.window, self.chunk)


def has_compiled_kernel(config: LayerAttentionConfig, kv: Tensor) -> bool:
    """Return True if there is a compiled CPU kernel for a layer over a cache like ``kv``."""
    fits = (
        config.indexer is None
        and config.head_dim % 16 == 0
        and config.heads // config.num_head_groups <= _MAX_HEADS_PER_KV
    )
    return fits and kv.device.type == "cpu" and kv.dtype in (torch.float32, *QUANTIZED)


class AttentionBackend(Protocol):
    """Attention of one step. A model calls it once per layer, in the order of its layers."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the step's keys and values into the cache and attend to all that each token may see.

        ``q``: ``[tokens, heads, head_dim]``, ``k`` and ``v``: ``[tokens, kv_heads, head_dim]``, already rotated, rows
        (sequences) one after the other in the batch's order. Any strides. Of a latent ``k`` and ``v`` are the same.
        Returns ``[tokens, heads * head_dim]``.
        """
        ...


class FusedAttentionBackend(AttentionBackend, Protocol):
    """An ``AttentionBackend`` that can also normalise and rotate queries and keys."""

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from a layer's projections ``[tokens, num_vectors, head_dim]``: queries, keys, values.

        ``qkv`` is contiguous and may be overwritten. Queries and keys are first normalised per head with the weights
        ``norm`` ``[heads + kv_heads, head_dim]``, if there are any, then rotated by ``cos`` and ``sin`` ``[tokens,
        dim]``, see ``rotary_tables``. With queries alone, ``[tokens, heads, head_dim]``, nothing is written: the step's
        keys and values are in the cache from an earlier call.
        """
        ...
