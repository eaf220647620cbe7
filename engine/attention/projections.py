"""From a layer's projections to what attention takes, in torch operators."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.layer import LayerAttention
from kernels.common.rotary import rotary
from kernels.layers.norm import rms_norm


def turned(
    about: LayerAttention, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as ``Attend`` takes them, of what ``LayerAttend.projected`` takes."""
    qk, v = torch.split(qkv, [about.heads + about.kv_heads, about.kv_heads], dim=1)
    qk = rotary(qk if norm is None else rms_norm(qk, norm, eps), cos, sin)
    return qk[:, : about.heads], qk[:, about.heads :], v
