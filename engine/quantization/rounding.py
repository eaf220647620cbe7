"""Round weights to the nearest of few levels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrices.int8 import Int8Matrix

_NUM_CLIPS, _CLIP_STEP = 10, 0.05
"""Number of clipped ranges that are tried, and by how much each is shorter than the one before."""
_MIN_SCALE = 1e-7
"""Smallest scale: float16 holds hardly smaller numbers."""


def round_int8_rows(weight: Tensor) -> Int8Matrix:
    """Round ``[out, in]`` to int8, symmetric, with one scale per row."""
    scales = (weight.abs().amax(1) / 127).clamp_(min=_MIN_SCALE)
    return Int8Matrix((weight / scales[:, None]).round_().to(torch.int8), scales)


def compute_symmetric_scales(groups: Tensor, bits: int) -> Tensor:
    """Return the scales of groups along the last axis, with the zero at ``2**(bits-1)``: float16 numbers as float32."""
    scales = groups.abs().amax(-1) * 2 / ((1 << bits) - 1)
    return _to_half(scales)


def round_symmetric(weight: Tensor, bits: int, size: int) -> GroupedMatrix:
    """Round ``[out, in]`` in groups of ``size`` columns, symmetric."""
    groups = weight.view(len(weight), -1, size)
    scales = compute_symmetric_scales(groups, bits)
    return _round_codes(groups, scales, torch.full_like(scales, 1 << (bits - 1)), bits)


def round_asymmetric(weight: Tensor, bits: int, size: int) -> GroupedMatrix:
    """Round with a zero for each group, so that its levels span exactly the group's range and 0."""
    groups = weight.view(len(weight), -1, size)
    return _round_range(groups, torch.ones(groups.shape[:2]), bits)


def round_clipped(weight: Tensor, bits: int, size: int, gram: Tensor) -> GroupedMatrix:
    """Round as ``round_asymmetric``, with each group's range clipped so that the products of its columns change least.

    A few large weights are clipped, all others are rounded more finely.

    ``gram``: ``[in, in]``, sum of ``x xᵀ`` over the inputs. This is AWQ's second search, which is in its code, not
    in its paper.
    """
    groups = weight.view(len(weight), -1, size)
    count = groups.shape[1]
    squares = gram.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    best, least_change = torch.ones(groups.shape[:2]), torch.full(groups.shape[:2], torch.inf)
    for step in range(_NUM_CLIPS):
        part = torch.full_like(best, 1 - step * _CLIP_STEP)
        error = (_round_range(groups, part, bits).dense().view(groups.shape) - groups).transpose(0, 1)
        change = ((error @ squares) * error).sum(-1).T
        is_better = change < least_change
        best, least_change = torch.where(is_better, part, best), torch.where(is_better, change, least_change)
    return _round_range(groups, best, bits)


def _round_range(groups: Tensor, part: Tensor, bits: int) -> GroupedMatrix:
    low, high = groups.amin(-1).clamp_(max=0) * part, groups.amax(-1).clamp_(min=0) * part
    max_code = (1 << bits) - 1
    scales = _to_half((high - low) / max_code)
    return _round_codes(groups, scales, (-low / scales).round_().clamp_(0, max_code), bits)


def _round_codes(groups: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> GroupedMatrix:
    codes = (groups / scales[..., None]).add_(zeros[..., None]).round_().clamp_(0, (1 << bits) - 1)
    return GroupedMatrix(codes.flatten(1).to(torch.uint8), scales, zeros, bits)


def _to_half(scales: Tensor) -> Tensor:
    return scales.clamp(min=_MIN_SCALE).half().float()
