"""Attention of a model whose layers differ in the sizes of their heads, which have a pool of keys for each size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from engine.attention.cuda_triton import TritonAttention
from engine.attention.layer import HeadShape
from engine.attention.no_layers import NoAttention
from engine.attention.plan import AttentionCostModel, AttentionMetadata
from engine.attention.select import CpuAttention
from kernels.common.attention_schedule import TileBuffers

Backend = TypeVar("Backend", CpuAttention, TritonAttention)


@dataclass(frozen=True, slots=True)
class AttentionGroup(Generic[Backend]):
    """The layers of one shape."""

    shape: HeadShape
    layers: Sequence[int]
    """Indices of the layers in the model, in the order of ``attend``."""
    attend: Backend
    cost_model: AttentionCostModel


class GroupedAttention(Generic[Backend]):
    """Passes each layer's call to the attention of its group. All groups share one page table."""

    def __init__(self, groups: Sequence[AttentionGroup[Backend]]) -> None:
        self.groups: Sequence[AttentionGroup[Backend]] = groups
        self._places: dict[int, tuple[AttentionGroup[Backend], int]] = {
            layer: (group, index) for group in groups for index, layer in enumerate(group.layers)
        }

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Plan a step. Every layer's call that follows belongs to it."""
        for group in self.groups:
            heads, kv_heads = group.shape.heads, group.shape.kv_heads
            own = replace(metadata, kv_heads=kv_heads, heads_per_kv=heads // kv_heads, cost_model=group.cost_model)
            group.attend.prepare(own)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, index = self._places[layer]
        return group.attend(index, q, k, v)

    def forward_qkv(self, layer: int, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        group, index = self._places[layer]
        return group.attend.forward_qkv(index, qkv, norm=norm, eps=eps, cos=cos, sin=sin)


class GroupedTritonAttention(GroupedAttention[TritonAttention]):
    """The same on a GPU, whose steps can be captured as those of ``TritonAttention``."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        super().prepare(metadata)
        self.is_repeatable = all(group.attend.is_repeatable for group in self.groups)
        self.buffers: tuple[TileBuffers, ...] = sum((group.attend.buffers for group in self.groups), ())


GpuAttention = TritonAttention | GroupedTritonAttention | NoAttention
"""Attention on a GPU of layers of one shape, of several, or of none."""
