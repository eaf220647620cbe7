"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x², last axis) + eps) * weight`` (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

    ``x``: ``[..., n]``. ``weight`` broadcasts over the trailing axes: ``[n]``, or ``[heads, n]`` where each head has
    its own. The mean is taken in float32 whatever ``x`` is.
    """
    normal = F.rms_norm(x.to(torch.float32), (x.shape[-1],), eps=eps)
    return (normal * weight).to(x.dtype)
