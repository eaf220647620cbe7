"""Attention of a model whose layers differ in the sizes of their heads, which have a pool of keys for each size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from engine.attention.layer import HeadShape
from engine.attention.plan import AttentionCostModel, AttentionMetadata
from engine.attention.select import CpuAttention


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """The layers of one shape."""

    shape: HeadShape
    layers: Sequence[int]
    """Indices of the layers in the model, in the order of ``attend``."""
    attend: CpuAttention
    cost_model: AttentionCostModel


class GroupedAttention:
    """A ``CpuAttention`` that passes each layer's call to that of its group. All groups share one page table."""

    def __init__(self, groups: Sequence[AttentionGroup]) -> None:
        self._groups = groups
        self._places = {layer: (group, index) for group in groups for index, layer in enumerate(group.layers)}

    def prepare(self, metadata: AttentionMetadata) -> None:
        for group in self._groups:
            heads, kv_heads = group.shape.heads, group.shape.kv_heads
            own = replace(metadata, kv_heads=kv_heads, heads_per_kv=heads // kv_heads, cost_model=group.cost_model)
            group.attend.prepare(own)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, index = self._places[layer]
        return group.attend(index, q, k, v)

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        group, index = self._places[layer]
        return group.attend.forward_qkv(index, qkv, norm=norm, eps=eps, cos=cos, sin=sin)
