"""Vectors as small numbers and a scale each: activations on their way into a product, keys and values into a cache."""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each type."""


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each vector ``[..., n]`` as numbers of ``dtype`` (int8 or float8_e4m3fn) and a float32 scale ``[...]`` that they
    are to be multiplied with: the largest in magnitude becomes the type's largest. Rounded to nearest, ties to even."""
    if x.is_cuda:
        from kernels.triton import quantize as on_gpu

        return on_gpu.quantize_vectors(x, dtype, LIMITS[dtype])
    limit = LIMITS[dtype]
    scales = x.abs().amax(dim=-1).float().clamp(min=1e-20) / limit
    values = (x / scales[..., None]).clamp(-limit, limit)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scales


def dequantize_vectors(numbers: Tensor, scales: Tensor) -> Tensor:
    """What ``quantize_vectors`` made, as float32 again."""
    return numbers.float() * scales[..., None]
