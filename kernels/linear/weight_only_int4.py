"""Products with 4-bit weights: codes from 0 to 15, and a scale and a zero for each group of inputs.

``weight = (code - zero) * scale``. "Act-order", which scatters the groups over the inputs, is undone when a weight is
loaded: inputs are sorted by group, and each product takes its activations in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear.fp32 import multiply_in_float32

_SLICES, _SIZES = 4, (32, 16)
"""Slices of a block, and the numbers of inputs that one may have: the first that divides a group."""


class Int4(NamedTuple):
    """A 4-bit weight ``[out, in]``."""

    packed: Tensor
    """int16 ``[blocks, out, size]``: a block is four slices of ``size`` consecutive inputs, and a number has the codes
    of one input of each slice, that of the first in its lowest bits. Behind the last input they are 0."""
    scales: Tensor
    """Floats ``[groups, out]``."""
    zeros: Tensor
    """uint8 ``[groups, out]``; up to 16."""
    order: Tensor | None
    """int32 ``[in]``: the activation of each input of ``packed``, if that is not its own index."""
    group: int
    """Number of inputs of a group."""


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None) -> Int4:
    """Return a weight. ``codes``: uint8 ``[out, in]``; the others as in ``Int4``, groups multiples of 16 inputs."""
    out, into = codes.shape
    group = into // len(scales)
    size = next(size for size in _SIZES if group % size == 0)
    slices = F.pad(codes, (0, -into % (_SLICES * size))).view(out, -1, _SLICES, size).transpose(0, 1)
    packed = torch.zeros(len(slices), out, size, dtype=torch.int32, device=codes.device)
    for index in range(_SLICES):  # one after the other: all at once would need 32 bits for each number
        packed |= slices[:, :, index].int() << (4 * index)
    return Int4(packed.to(torch.int16), scales.contiguous(), zeros.to(torch.uint8).contiguous(), order, group)


def unpack_int4(weight: Int4) -> Tensor:
    """Return the codes, uint8 ``[out, in]``."""
    shifts = 4 * torch.arange(_SLICES, dtype=torch.int32, device=weight.packed.device)[:, None]
    codes = (weight.packed.int()[:, :, None] >> shifts) & 15
    return codes.transpose(0, 1).flatten(1)[:, : weight.group * len(weight.scales)].to(torch.uint8)


def dequantize(weight: Int4) -> Tensor:
    """Return the weight in float32, ``[out, in]``."""
    zeros, scales = (x.T.repeat_interleave(weight.group, dim=1) for x in (weight.zeros, weight.scales))
    sorted_by_group = (unpack_int4(weight).to(torch.int32) - zeros.to(torch.int32)) * scales.float()
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
        from kernels.triton.sliced import sliced

        packed, scales, zeros, order, group = weight
        return sliced(
            x,
            packed,
            scales,
            zeros,
            bias,
            order=order,
            group=group,
            dtype=dtype,
            is_batch_invariant=is_batch_invariant,
        )
    return multiply_in_float32(x, dequantize(weight), bias, dtype or x.dtype)
