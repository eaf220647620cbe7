"""Attention of a step's tokens over the paged cache, behind one interface for every model and device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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


class Attend(Protocol):
    """One step's attention: what a model calls once per layer, in the order of its layers."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes the step's keys and values into the cache and attends to all that each token may see.

        ``q``: ``[tokens, heads, head_dim]``, ``k`` and ``v``: ``[tokens, kv_heads, head_dim]``, positions already
        encoded, rows (sequences) one after the other in the batch's order. Any strides. Returns ``[tokens, heads *
        head_dim]``.
        """
        ...
