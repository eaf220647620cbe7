"""Root-mean-square normalisation."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.cpu.availability import computes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x², last axis) + eps) * weight`` (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

    ``x``: ``[..., n]`` float32. ``weight``: ``[n]``, or ``[heads, n]`` where each head has its own.

    The divisor is the hypotenuse of the vector's norm over √n and √eps: half the operators of the formula above, and
    half of the time of torch's own ``rms_norm`` for few rows. Where there is a kernel it is one pass, on a GPU also for
    16-bit ``x``.
    """
    if x.is_cuda:
        from kernels.triton import norm as on_gpu

        return on_gpu.rms_norm(x, weight, eps)
    if computes(x, weight):
        from kernels.cpu.layers import norm as on_cpu

        return on_cpu.rms_norm(x, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
    return x.div(norm.hypot_(_root(eps))).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``rms_norm(residual + x)`` and ``residual + x``, which a GPU reads and writes once. Shapes as there."""
    if x.is_cuda:
        from kernels.triton import norm as on_gpu

        return on_gpu.add_rms_norm(x, residual, weight, eps)
    total = residual + x
    return rms_norm(total, weight, eps), total


@cache
def _root(eps: float) -> Tensor:
    return torch.tensor(eps).sqrt()
