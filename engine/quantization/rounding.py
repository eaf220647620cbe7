"""Rounding to the nearest of few levels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.matrix import GroupedMatrix, Int8Matrix

_CUTS, _CUT = 10, 0.05
"""How many spans are tried, and by how much each is shorter."""
_LEAST = 1e-7
"""Of a scale: float16 holds nothing much smaller."""


def int8_rows(weight: Tensor) -> Int8Matrix:
    """One scale for each row of ``[out, in]``, symmetric."""
    scales = (weight.abs().amax(1) / 127).clamp_(min=_LEAST)
    return Int8Matrix((weight / scales[:, None]).round_().to(torch.int8), scales)


def symmetric_scales(groups: Tensor, bits: int) -> Tensor:
    """Scales (float16 numbers, as float32) of groups along the last axis, zero at ``2**(bits-1)``."""
    scales = groups.abs().amax(-1) * 2 / ((1 << bits) - 1)
    return _half(scales)


def symmetric(weight: Tensor, bits: int, size: int) -> GroupedMatrix:
    """Groups of ``size`` columns of ``[out, in]``."""
    groups = weight.view(len(weight), -1, size)
    scales = symmetric_scales(groups, bits)
    return _rounded(groups, scales, torch.full_like(scales, 1 << (bits - 1)), bits)


def asymmetric(weight: Tensor, bits: int, size: int) -> GroupedMatrix:
    """The same with a zero for each group, so that its levels span exactly what is there, and 0."""
    groups = weight.view(len(weight), -1, size)
    return _spanning(groups, torch.ones(groups.shape[:2]), bits)


def clipped(weight: Tensor, bits: int, size: int, gram: Tensor) -> GroupedMatrix:
    """``asymmetric`` with each group's span cut to the part of it at which the products of that group's columns change
    least: few large weights are cut, all others are rounded finer.

    ``gram``: ``[in, in]``, sum of ``x xᵀ`` over the inputs. (AWQ's second search, which its paper leaves to its code.)
    """
    groups = weight.view(len(weight), -1, size)
    count = groups.shape[1]
    squares = gram.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    best, least = torch.ones(groups.shape[:2]), torch.full(groups.shape[:2], torch.inf)
    for step in range(_CUTS):
        part = torch.full_like(best, 1 - step * _CUT)
        wrong = (_spanning(groups, part, bits).dense().view(groups.shape) - groups).transpose(0, 1)
        change = ((wrong @ squares) * wrong).sum(-1).T
        better = change < least
        best, least = torch.where(better, part, best), torch.where(better, change, least)
    return _spanning(groups, best, bits)


def _spanning(groups: Tensor, part: Tensor, bits: int) -> GroupedMatrix:
    low, high = groups.amin(-1).clamp_(max=0) * part, groups.amax(-1).clamp_(min=0) * part
    most = (1 << bits) - 1
    scales = _half((high - low) / most)
    return _rounded(groups, scales, (-low / scales).round_().clamp_(0, most), bits)


def _rounded(groups: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> GroupedMatrix:
    codes = (groups / scales[..., None]).add_(zeros[..., None]).round_().clamp_(0, (1 << bits) - 1)
    return GroupedMatrix(codes.flatten(1).to(torch.uint8), scales, zeros, bits)


def _half(scales: Tensor) -> Tensor:
    return scales.clamp(min=_LEAST).half().float()
