"""Root-mean-square normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.layers import norm as on_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x², last axis) + eps) * weight``.

    ``x``: ``[..., n]``, float32, on a GPU also 16-bit. ``weight``: ``[n]``, or ``[heads, n]`` with one for each head.
    """
    if x.is_cuda:
        from kernels.triton import norm as on_gpu

        return on_gpu.rms_norm(x, weight, eps)
    if can_use_kernels(x, weight):
        return on_cpu.rms_norm(x, weight, eps)
    return (x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``rms_norm(residual + x)`` and ``residual + x``, in one pass on a GPU. Shapes as in ``rms_norm``."""
    if x.is_cuda:
        from kernels.triton import norm as on_gpu

        return on_gpu.add_rms_norm(x, residual, weight, eps)
    total = residual + x
    return rms_norm(total, weight, eps), total
