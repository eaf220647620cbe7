"""Products with 8-bit weights: of activations as they are, or rounded to 8 bits too, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.quantization import Quantization, QuantizedRows, Rows
from kernels.linear.fp32 import multiply_in_float32
from kernels.quantize import quantize_rows

QUANTIZATION = Quantization(torch.int8)
"""The way in which ``int8_linear`` quantizes its activations."""


def int8_weight_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *,
    zeros: Tensor | None = None, order: Tensor | None = None,
    dtype: torch.dtype | None = None, is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``x[:, order] @ ((weight - zeros) * scales).T + bias`` for ``x`` ``[rows, in]``, in ``dtype``.

    ``weight``: int8 or float8_e4m3fn ``[out, in]``; ``scales`` and ``zeros``: floats ``[groups, out]``, one for each
    group of inputs (a multiple of 16) and output; ``order``: int32 ``[in]``; ``dtype``: ``None`` for that of ``x``.
    ``is_batch_invariant``: on a GPU no row depends, to the bit, on the others. Raises ``ValueError`` if the shapes
    disagree.
    """
    (out, into), groups = weight.shape, len(scales)
    if scales.shape != (groups, out) or groups == 0 or into % groups or into // groups % 16:
        raise ValueError(
            f"a weight of 8 bits {(out, into)} with scales {tuple(scales.shape)}; expected [groups, {out}] with groups "
            f"of a multiple of 16 inputs"
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros {tuple(zeros.shape)} for scales {tuple(scales.shape)}")
    if x.is_cuda:
        from kernels.triton import weight_only as on_gpu

        return on_gpu.weight_only(
            x,
            weight,
            scales,
            bias,
            on_gpu.BYTES,
            zeros=zeros,
            order=order,
            dtype=dtype,
            is_batch_invariant=is_batch_invariant,
        )
    dequantized, size = weight.float(), into // groups
    if zeros is not None:
        dequantized = dequantized - zeros.float().T.repeat_interleave(size, dim=1)
    dequantized = dequantized * scales.float().T.repeat_interleave(size, dim=1)
    return multiply_in_float32(x if order is None else x[:, order], dequantized, bias, dtype or x.dtype)


def int8_linear(
    x: Rows, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *,
    dtype: torch.dtype | None = None, is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``x @ (weight * scales).T + bias`` with each row of ``x`` rounded to int8; the sums are exact integers.

    ``x`` may be quantized already. ``weight``: int8 ``[out, in]``, ``in`` a multiple of 32; ``scales``: floats
    ``[out]``. Raises ``ValueError`` if the shapes disagree. For the options see ``int8_weight_linear``.
    """
    out, into = weight.shape
    if scales.shape != (out,) or into % 32:
        raise ValueError(
            f"an int8 weight {(out, into)} with scales {tuple(scales.shape)}; inputs come in multiples of 32"
        )
    quantized = x if isinstance(x, QuantizedRows) else quantize_rows(x, QUANTIZATION)
    rows, row_scales = quantized.codes, quantized.scales
    if weight.is_cuda:
        from kernels.triton import scaled as on_gpu

        return on_gpu.scaled(
            rows, row_scales, weight, scales, bias, dtype or x.dtype, is_batch_invariant=is_batch_invariant
        )
    products = torch._int_mm(rows, weight.T).float() * row_scales[:, None] * scales.float()
    return (products if bias is None else products + bias).to(dtype or x.dtype)
