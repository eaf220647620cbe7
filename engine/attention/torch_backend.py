"""Paged attention in plain torch operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import LayerAttention
from kernels.attention import RowGroup, Workspace, paged_attention


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where one step's tokens go and what they read; the same for every layer."""

    slots: Tensor
    """``[tokens]`` where their keys and values go: page * page_size + offset."""
    rows: Sequence[RowGroup]


class TorchAttention:
    """``Attend`` on the CPU. ``plan`` is set before each step."""

    plan: StepPlan

    def __init__(self, layers: Sequence[LayerAttention], kv: Tensor) -> None:
        """``kv``: ``[layers, pages, page_size, 2 * kv_heads, head_dim]``, keys of all heads before the values."""
        self._layers = layers
        self._kv = kv
        self._workspace = Workspace()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Attend``."""
        pool, about = self._kv[layer], self._layers[layer]
        pool.flatten(0, 1).index_copy_(0, self.plan.slots, torch.cat((k, v), dim=1))
        return paged_attention(
            q,
            pool,
            self.plan.rows,
            self._workspace,
            scale=about.scale,
            window=about.window,
            softcap=about.softcap,
        )
