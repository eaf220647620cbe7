"""Products with weights in NF4 (Dettmers et al. 2023, "QLoRA", https://arxiv.org/abs/2305.14314, section 3): each of 4
bits names one of 16 quantiles of the normal distribution, scaled by the largest weight of its group of inputs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear.fp32 import multiply_in_float32

CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The paper's appendix E."""
FLOATS_OF_4_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1, the numbers of MXFP4 and NVFP4, which the same kernels multiply by."""


class Nf4(NamedTuple):
    """An NF4 weight ``[out, in]``."""

    packed: Tensor
    """uint8 ``[out, in / 2]``; the first of two neighbours is in the upper half."""
    scales: Tensor
    """``[groups, out]``, float32, or bfloat16 if it holds them exactly."""
    levels: tuple[float, ...] = CODES
    """Weight of each code, before it is scaled; 4-bit floats have others than NF4."""


def from_bitsandbytes(packed: Tensor, absmax: Tensor, out: int, into: int) -> Nf4:
    """Convert a weight as bitsandbytes stores it: uint8 with two weights each, row by row, and a float32 scale a group.

    If the scales were quantized themselves, that must be undone. Raises ``ValueError`` if sizes disagree or groups
    cross rows.
    """
    groups, rest = divmod(absmax.numel(), out)
    if packed.numel() * 2 != out * into or rest or groups == 0 or into % groups or into // groups % 16:
        raise ValueError(
            f"{packed.numel()} bytes and {absmax.numel()} scales for an NF4 weight {(out, into)}; expected "
            f"{out * into // 2} bytes, and for each output the same number of groups of a multiple of 16 inputs"
        )
    return Nf4(packed.reshape(out, into // 2).contiguous(), absmax.reshape(out, groups).float().T.contiguous())


def dequantize(weight: Nf4) -> Tensor:
    """Return the weight in float32, ``[out, in]``."""
    codes = torch.stack((weight.packed >> 4, weight.packed & 15), dim=-1).flatten(1).long()
    size = codes.shape[1] // len(weight.scales)
    return _load_levels(weight.levels, weight.packed.device)[codes] * weight.scales.T.repeat_interleave(size, dim=1)


def nf4_linear(
    x: Tensor, weight: Nf4, bias: Tensor | None = None, *,
    dtype: torch.dtype | None = None, is_batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``x @ dequantize(weight).T + bias`` for ``x`` ``[rows, in]``, in ``dtype``.

    On a GPU the codes are rounded to the type of ``x``, the scales are not. ``dtype``: ``None`` for that of
    ``x``. ``is_batch_invariant``: on a GPU no row depends, to the bit, on the others.
    """
    if x.is_cuda:
        from kernels.triton import weight_only as on_gpu

        return on_gpu.weight_only(
            x, weight.packed, weight.scales, bias, on_gpu.NF4,
            codes=_load_levels(weight.levels, x.device), dtype=dtype, is_batch_invariant=is_batch_invariant,
        )  # fmt: skip
    return multiply_in_float32(x, dequantize(weight), bias, dtype or x.dtype)


class Nf4Product:
    """The function ``nf4_linear`` of one weight."""

    def __init__(self, weight: Nf4) -> None:
        self.weight = weight

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, dtype: torch.dtype | None = None, is_batch_invariant: bool = False
    ) -> Tensor:
        return nf4_linear(x, self.weight, bias, dtype=dtype, is_batch_invariant=is_batch_invariant)


def grouped_nf4_linear(
    x: Tensor, weight: Nf4, bias: Tensor | None, ends: Tensor, *, is_batch_invariant: bool = False
) -> Tensor:
    """Return the products of rows ``[rows, in]``, sorted by expert, with the weight of their own expert.

    ``weight``: that of all experts, ``packed`` ``[experts, out, in / 2]`` and ``scales`` ``[experts, groups, out]``;
    ``bias``: ``[experts, out]``. ``ends``: int32 ``[experts]``, the row after each expert's last one. The others as in
    ``nf4_linear``.
    """
    if x.is_cuda:
        from kernels.triton import grouped as on_gpu

        codes = _load_levels(weight.levels, x.device)
        return on_gpu.grouped(
            x, weight.packed, weight.scales, codes, bias, ends, is_batch_invariant=is_batch_invariant
        )  # fmt: skip
    result, start = torch.empty(len(x), weight.packed.shape[1], dtype=x.dtype), 0
    for expert, end in enumerate(ends.tolist()):
        own = Nf4(weight.packed[expert], weight.scales[expert], weight.levels)
        result[start:end] = nf4_linear(x[start:end], own, None if bias is None else bias[expert])
        start = end
    return result


@cache
def _load_levels(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, device=device)
