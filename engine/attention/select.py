"""The attention of models on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.attention.cpu_deterministic import DeterministicAttention
from engine.attention.cpu_torch import TorchAttention
from engine.attention.layer import LayerAttend, LayerAttention, is_compiled
from engine.attention.plan import Rows


class HostAttention(LayerAttend, Protocol):
    """``LayerAttend`` with its plan."""

    def prepare(self, rows: Rows) -> None:
        """Plans a step."""
        ...


def host_attention(
    layers: Sequence[LayerAttention], kv: Tensor, scales: Tensor | None, *, deterministic: bool = False
) -> HostAttention:
    """The fastest there is. ``kv``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values: float32,
    or 8-bit with ``scales``, float32 ``[layers, 2, kv_heads, pages, page_size]``.

    ``deterministic``: what a token gets is, bit for bit, a function of its sequence alone.
    """
    if is_compiled(layers[0], kv):
        from engine.attention.cpu_numba import CompiledAttention

        return CompiledAttention(layers, kv, scales, sharing=not deterministic)
    return (DeterministicAttention if deterministic else TorchAttention)(layers, kv, scales)
