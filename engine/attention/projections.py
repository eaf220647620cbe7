"""Turn a layer's projections into rotated queries, keys and values, in torch operators."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from kernels.common.rotary import rotary
from kernels.layers.norm import rms_norm


def normalize_and_rotate(
    config: LayerAttentionConfig, qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values for ``AttentionBackend``, from the arguments of ``FusedAttentionBackend``."""
    qk, v = torch.split(qkv, [config.heads + config.kv_heads, config.kv_heads], dim=1)
    qk = rotary(qk if norm is None else rms_norm(qk, norm, eps), cos, sin)
    return qk[:, : config.heads], qk[:, config.heads :], v
