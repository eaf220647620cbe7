"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x², last axis) + eps) * weight`` (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

    ``x``: ``[..., n]``. ``weight``: ``[n]``, or ``[heads, n]`` where each head has its own. The mean is in float32
    at least, whatever ``x`` is.
    """
    if weight.ndim == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], eps=eps) * weight
