"""Quantization of vectors to int8 or float8 with a scale each: of activations before a product, of keys and values.

Keys and values may also be quantized to 4 bits; see ``quantize_int4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.int4 import INT4, dequantize_int4, quantize_int4
from kernels.common.quantization import LIMITS as LIMITS
from kernels.common.quantization import Quantization, QuantizedRows

QUANTIZED = (*LIMITS, INT4)
"""Types of quantized keys and values."""


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize each vector ``[..., n]``; return numbers of ``dtype`` (int8 or float8_e4m3fn) and scales ``[...]``.

    With ``INT4`` see ``quantize_int4``.

    A vector is its numbers times its scale; its largest magnitude becomes the largest number of the type. Rounded to
    nearest, ties to even.
    """
    if dtype == INT4:
        return quantize_int4(x)
    if x.is_cuda:
        from kernels.triton import quantize as on_gpu

        return on_gpu.quantize_vectors(x, dtype, LIMITS[dtype])
    limit = LIMITS[dtype]
    scales = x.abs().amax(dim=-1).float().clamp(min=1e-20) / limit
    values = (x / scales[..., None]).clamp(-limit, limit)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scales


def quantize_rows(x: Tensor, quantization: Quantization) -> QuantizedRows:
    """Quantize each row of ``x`` ``[rows, n]``, or each block of it."""
    dtype, block = quantization
    codes, scales = quantize_vectors(x if block is None else x.reshape(len(x), x.shape[1] // block, block), dtype)
    return QuantizedRows(codes.view(x.shape), scales, x.dtype)


def dequantize_vectors(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 vectors of the results of ``quantize_vectors``."""
    if numbers.dtype == INT4:
        return dequantize_int4(numbers, scales)
    return numbers.float() * scales[..., None]
