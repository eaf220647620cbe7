"""Root-mean-square normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

The results may be quantized for the product that reads them, in the same kernel on a GPU; the numbers are those of
``kernels.quantize.quantize_rows``.
"""

from __future__ import annotations

from typing import overload

from torch import Tensor

from kernels.common.quantization import Quantization, QuantizedRows, Rows
from kernels.cpu.availability import can_use_kernels
from kernels.cpu.layers import norm as on_cpu
from kernels.layers.elementwise import add
from kernels.quantize import quantize_rows


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, quantization: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, quantization: Quantization) -> QuantizedRows: ...
def rms_norm(x: Tensor, weight: Tensor, eps: float, quantization: Quantization | None = None) -> Rows:
    """Return ``x / sqrt(mean(x², last axis) + eps) * weight``.

    ``x``: ``[..., n]``, float32, on a GPU also 16-bit. ``weight``: ``[n]``, or ``[heads, n]`` with one for each head.
    ``quantization``: quantize the result, for ``x`` ``[rows, n]`` and ``weight`` ``[n]``.
    """
    if x.is_cuda:
        from kernels.triton import norm as on_gpu

        return on_gpu.rms_norm(x, weight, eps, quantization)
    if quantization is not None:
        return quantize_rows(rms_norm(x, weight, eps), quantization)
    if can_use_kernels(x, weight):
        return on_cpu.rms_norm(x, weight, eps)
    return (x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


@overload
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantization: None = None
) -> tuple[Tensor, Tensor]: ...
@overload
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantization: Quantization
) -> tuple[QuantizedRows, Tensor]: ...
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantization: Quantization | None = None
) -> tuple[Rows, Tensor]:
    """Return ``rms_norm(residual + x)`` and ``residual + x``, in one pass on a GPU. Arguments as in ``rms_norm``."""
    if x.is_cuda:
        from kernels.triton import norm as on_gpu

        return on_gpu.add_rms_norm(x, residual, weight, eps, quantization)
    total = add(residual, x)
    return rms_norm(total, weight, eps, quantization), total
