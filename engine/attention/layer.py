"""Attention of a step's tokens over the paged cache, behind one interface for every model and device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.quantize import LIMITS

_MOST_HEADS = 64
"""Query heads for each key-value head that the kernel has room for."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer's attention computes. All layers of a model share ``kv_heads`` and ``head_dim``."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, usually ``head_dim ** -0.5``."""
    window: int | None = None
    """A query sees this many of the latest keys, its own included; ``None``: all."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)`` before the mask (Gemma 2)."""


def is_compiled(about: LayerAttention, kv: Tensor) -> bool:
    """Whether there is a kernel for a layer and keys and values as in this cache, which is not on a GPU."""
    fits = about.head_dim % 16 == 0 and about.heads // about.kv_heads <= _MOST_HEADS
    return fits and kv.device.type == "cpu" and kv.dtype in (torch.float32, *LIMITS)


class Attend(Protocol):
    """One step's attention: what a model calls once per layer, in the order of its layers."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes the step's keys and values into the cache and attends to all that each token may see.

        ``q``: ``[tokens, heads, head_dim]``, ``k`` and ``v``: ``[tokens, kv_heads, head_dim]``, positions already
        encoded, rows (sequences) one after the other in the batch's order. Any strides. Returns ``[tokens, heads *
        head_dim]``.
        """
        ...


class LayerAttend(Attend, Protocol):
    """The same for models that leave it the way from their projections, too."""

    def projected(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention of a layer's projections ``[tokens, heads + 2 * kv_heads, head_dim]``, contiguous, which may be
        overwritten: queries, keys, values.

        Queries and keys are first normalised, each head with its own of the weights ``norm`` ``[heads + kv_heads,
        head_dim]``, unless there are none; then turned by ``cos`` and ``sin`` ``[tokens, dim]``, see ``rotary_tables``.
        """
        ...
