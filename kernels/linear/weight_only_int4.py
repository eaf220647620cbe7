"""Products with 4-bit weights: codes from 0 to 15, and a scale and a zero for each group of inputs.

``weight = (code - zero) * scale``. The public layouts, GPTQ and AWQ, are multiplied as they are stored. GPTQ's
"act-order", which scatters the groups over the inputs, is undone when a weight is loaded: inputs are sorted by group,
and each product takes its activations in that order.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

_NIBBLES = torch.arange(8, dtype=torch.int32) * 4
_AWQ_NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32) * 4


class Layout(Enum):
    """Order of the eight codes in a 32-bit word."""

    GPTQ = 0
    """``[in / 8, out]``: consecutive inputs, lowest bits first."""
    AWQ = 1
    """``[in, out / 8]``: consecutive outputs, the evens in the lower half and the odds in the upper."""


class Int4(NamedTuple):
    """A 4-bit weight ``[out, in]``."""

    packed: Tensor
    """int32, in the order of ``layout``."""
    scales: Tensor
    """Floats ``[groups, out]``."""
    zeros: Tensor
    """uint8 ``[groups, out]``; up to 16."""
    layout: Layout
    order: Tensor | None
    """int32 ``[in]``: the activation of each input of ``packed``, if that is not its own index."""


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, groups: Tensor | None = None, *, offset: int = 1
) -> Int4:
    """Convert a weight as GPTQ checkpoints store it.

    ``qweight``: int32 ``[in / 8, out]``; ``qzeros``: int32 ``[groups, out / 8]``; ``scales``: ``[groups, out]``;
    ``groups`` (``g_idx``): ``[in]``, the group of each input. ``offset`` is added to the stored zeros: 1, but 0 in
    format 2. Raises ``ValueError`` if the shapes disagree or groups have different sizes.
    """
    into, out, count = 8 * qweight.shape[0], qweight.shape[1], scales.shape[0]
    _check_shapes(into, out, qzeros, scales)
    zeros = (_nibbles(qzeros, _NIBBLES) + offset).to(torch.uint8)
    size = into // count
    if groups is None or torch.equal(groups.long(), torch.arange(into, device=groups.device) // size):
        return Int4(qweight.contiguous(), scales.contiguous(), zeros, Layout.GPTQ, None)
    if groups.shape != (into,) or groups.long().bincount().tolist() != [size] * count:
        raise ValueError(f"g_idx must name each of {count} groups for {size} of {into} inputs")
    order = groups.long().argsort(stable=True)
    numbers = _nibbles(qweight.T, _NIBBLES)[:, order]
    shifted = numbers.view(out, into // 8, 8) << _NIBBLES.to(numbers.device)
    packed = shifted.sum(dim=-1, dtype=torch.int32).T.contiguous()
    return Int4(packed, scales.contiguous(), zeros, Layout.GPTQ, order.to(torch.int32))


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Int4:
    """Convert a weight as AWQ checkpoints store it (version "gemm").

    ``qweight``: int32 ``[in, out / 8]``; ``qzeros``: int32 ``[groups, out / 8]``; ``scales``: ``[groups, out]``.
    Raises ``ValueError`` if the shapes disagree.
    """
    _check_shapes(qweight.shape[0], 8 * qweight.shape[1], qzeros, scales)
    zeros = _nibbles(qzeros, _AWQ_NIBBLES).to(torch.uint8)
    return Int4(qweight.contiguous(), scales.contiguous(), zeros, Layout.AWQ, None)


def dequantize(weight: Int4) -> Tensor:
    """Return the weight in float32, ``[out, in]``."""
    if weight.layout is Layout.GPTQ:
        numbers = _nibbles(weight.packed.T, _NIBBLES)
    else:
        numbers = _nibbles(weight.packed, _AWQ_NIBBLES).T
    size = numbers.shape[1] // len(weight.scales)
    zeros, scales = (x.T.repeat_interleave(size, dim=1) for x in (weight.zeros, weight.scales))
    sorted_by_group = (numbers - zeros.to(torch.int32)) * scales.float()
    if weight.order is None:
        return sorted_by_group
    return torch.empty_like(sorted_by_group).index_copy_(1, weight.order.long(), sorted_by_group)


def int4_linear(x: Tensor, weight: Int4, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ dequantize(weight).T + bias`` for ``x`` ``[rows, in]``, in the type of ``x``."""
    if x.is_cuda:
        from kernels.triton import weight_only as on_gpu

        return on_gpu.weight_only(
            x, weight.packed, weight.scales, bias, weight.layout.value, zeros=weight.zeros, order=weight.order
        )
    return torch.nn.functional.linear(x, dequantize(weight).to(x.dtype), bias)


def _nibbles(words: Tensor, shifts: Tensor) -> Tensor:
    """Unpack words ``[rows, columns]`` to int32 ``[rows, 8 * columns]``."""
    return ((words[..., None] >> shifts.to(words.device)) & 15).flatten(-2)


def _check_shapes(into: int, out: int, qzeros: Tensor, scales: Tensor) -> None:
    groups = scales.shape[0]
    if scales.shape != (groups, out) or qzeros.shape != (groups, out // 8) or out % 8:
        raise ValueError(
            f"a weight of {into} inputs and {out} outputs with scales {tuple(scales.shape)} and zeros "
            f"{tuple(qzeros.shape)}; expected {(groups, out)} and {(groups, out // 8)}, outputs in eights"
        )
    if groups == 0 or into % groups or into // groups % 16:
        raise ValueError(f"{into} inputs in {groups} groups; a group must have a multiple of 16 inputs")
