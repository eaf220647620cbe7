"""Products of float8 weights and activations, with scales by tensor, by channel or by block.

The activations are rounded when they are multiplied: each row with a scale of its own, or each 128 inputs of each row
if the weight has a scale for each block of 128 by 128 (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.quantization import Quantization, QuantizedRows, Rows
from kernels.quantize import quantize_rows

BLOCK = 128
_LIBRARY_ROWS = 65
"""Rows from which torch's product is used: with fewer ones its tiles leave most of a GPU idle, as it splits no sums."""
_LIBRARY_MAJORS = 9, 10
"""Major compute capabilities, those of Hopper and Blackwell, for which torch has a product with such scales."""
_ALIGNMENT = 16
"""Inputs and outputs come in multiples of this there."""


def find_quantization(weight: Tensor, scales: Tensor) -> Quantization:
    """Return the way in which ``fp8_linear`` quantizes its activations. Raises ``ValueError`` as it does."""
    out, into = weight.shape
    blocks = -(-out // BLOCK), into // BLOCK
    if (scales.numel() == 1 or (scales.numel() == out and scales.shape[0] == out)) and into % 32 == 0:
        return Quantization(weight.dtype)
    if scales.shape == blocks and into % BLOCK == 0:
        return Quantization(weight.dtype, BLOCK)
    raise ValueError(
        f"a float8 weight {(out, into)} with scales {tuple(scales.shape)}; expected 1, {out}, or {blocks} with inputs "
        f"in multiples of {BLOCK}"
    )


def fp8_linear(
    x: Rows, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *,
    dtype: torch.dtype | None = None, is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``x @ (weight * scales).T + bias`` for ``x`` ``[rows, in]``, in ``dtype``.

    ``x`` may be quantized already, as ``find_quantization`` says. ``weight``: float8_e4m3fn ``[out, in]``, ``in`` a
    multiple of 32 (of 128 with blocks). ``scales``: float32 ``[]`` (or ``[1]``), ``[out]`` (or ``[out, 1]``) or
    ``[ceil(out / 128), in / 128]``. ``dtype``: ``None`` for that of ``x``. ``is_batch_invariant``: on a GPU no row
    depends, to the bit, on the others. Raises ``ValueError`` for other shapes.
    """
    quantization = find_quantization(weight, scales)
    quantized = x if isinstance(x, QuantizedRows) else quantize_rows(x, quantization)
    if quantization.block is None:
        scales = scales.reshape(-1).expand(len(weight))
    return _multiply(quantized, weight, scales, bias, dtype or x.dtype, is_batch_invariant)


def _multiply(
    x: QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, is_batch_invariant: bool
) -> Tensor:
    rows, row_scales = x.codes, x.scales
    if weight.is_cuda and not is_batch_invariant and scales.dim() == 1 and _has_library_product(rows, weight, dtype):
        return multiply_by_library(rows, row_scales, weight, scales, bias)
    if weight.is_cuda:
        from kernels.triton import scaled as on_gpu

        return on_gpu.scaled(rows, row_scales, weight, scales, bias, dtype, is_batch_invariant=is_batch_invariant)
    dequantized = weight.float()
    if scales.dim() == 1:
        dequantized, x_rounded = dequantized * scales[:, None], rows.float() * row_scales[:, None]
    else:
        spread = scales.repeat_interleave(BLOCK, dim=0)[: len(weight)].repeat_interleave(BLOCK, dim=1)
        dequantized, x_rounded = dequantized * spread, rows.float() * row_scales.repeat_interleave(BLOCK, dim=1)
    products = x_rounded @ dequantized.T
    return (products if bias is None else products + bias).to(dtype)


def _has_library_product(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    if len(rows) < _LIBRARY_ROWS or dtype != torch.bfloat16 or any(size % _ALIGNMENT for size in weight.shape):
        return False
    return torch.cuda.get_device_capability(rows.device)[0] in _LIBRARY_MAJORS


def multiply_by_library(
    rows: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the product of float8 numbers with a scale for each row and each channel, in bfloat16, by torch."""
    return torch._scaled_mm(
        rows,
        weight.T,
        scale_a=row_scales[:, None].contiguous(),
        scale_b=scales[None, :].contiguous(),
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
    )
