"""Products with 4-bit weights: codes from 0 to 15, and a scale and a zero for each group of inputs.

``weight = (code - zero) * scale``. "Act-order", which scatters the groups over the inputs, is undone when a weight is
loaded: inputs are sorted by group, and each product takes its activations in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear.fp32 import multiply_in_float32


class Int4(NamedTuple):
    """A 4-bit weight ``[out, in]``."""

    packed: Tensor
    """int32 ``[in / 8, out]``: a word holds consecutive inputs, lowest bits first (GPTQ's layout)."""
    scales: Tensor
    """Floats ``[groups, out]``."""
    zeros: Tensor
    """uint8 ``[groups, out]``; up to 16."""
    order: Tensor | None
    """int32 ``[in]``: the activation of each input of ``packed``, if that is not its own index."""


def dequantize(weight: Int4) -> Tensor:
    """Return the weight in float32, ``[out, in]``."""
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=weight.packed.device)
    numbers = ((weight.packed.T[..., None] >> shifts) & 15).flatten(1)
    size = numbers.shape[1] // len(weight.scales)
    zeros, scales = (x.T.repeat_interleave(size, dim=1) for x in (weight.zeros, weight.scales))
    sorted_by_group = (numbers - zeros.to(torch.int32)) * scales.float()
    if weight.order is None:
        return sorted_by_group
    return torch.empty_like(sorted_by_group).index_copy_(1, weight.order.long(), sorted_by_group)


def int4_linear(
    x: Tensor, weight: Int4, bias: Tensor | None = None, *,
    dtype: torch.dtype | None = None, is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``x @ dequantize(weight).T + bias`` for ``x`` ``[rows, in]``, in ``dtype``.

    ``dtype``: ``None`` for that of ``x``. ``is_batch_invariant``: on a GPU no row depends, to the bit, on the others.
    """
    if x.is_cuda:
        from kernels.triton import weight_only as on_gpu

        packed, scales, zeros, order = weight
        return on_gpu.weight_only(
            x,
            packed,
            scales,
            bias,
            on_gpu.INT4,
            zeros=zeros,
            order=order,
            dtype=dtype,
            is_batch_invariant=is_batch_invariant,
        )
    return multiply_in_float32(x, dequantize(weight), bias, dtype or x.dtype)
