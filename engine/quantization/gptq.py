"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): rounding column by column, each error made good by the
columns that are still to come."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.protocol.types import EngineError
from engine.quantization.rounding import symmetric_scales
from engine.weights.matrix import GroupedMatrix

_DAMPING = (0.01, 0.1, 1.0)
"""Part of the mean diagonal that is added to it: the paper's, and what is tried where that is not enough."""
_BLOCK = 128
"""Columns whose errors reach the columns behind them as one product (section 3.3, step 2)."""


def gptq(weight: Tensor, gram: Tensor, bits: int, size: int, *, act_order: bool = True) -> GroupedMatrix:
    """Rounds ``weight`` ``[out, in]`` so that products with its inputs change least.

    ``gram``: ``[in, in]``, sum of ``x xᵀ`` over the inputs. ``size``: columns of a group. ``act_order``: columns with
    the largest inputs first; a group is then of columns that follow each other in that order.
    """
    rows, columns = weight.shape
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    weight, inverse = weight[:, order].clone(), _inverse_factor(gram[order][:, order])
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, columns // size)
    # Blocks are parts of groups or made of whole ones, so that a group's scale is that of its weights as corrected.
    step = size if size > _BLOCK else _BLOCK // size * size
    for start in range(0, columns, step):
        block = weight[:, start : start + step]
        errors = torch.empty_like(block)
        for place in range(block.shape[1]):
            column = start + place
            group = column // size
            if column % size == 0:
                scales[:, group] = symmetric_scales(block[:, place : place + size], bits)
            scale = scales[:, group]
            code = (block[:, place] / scale + middle).round_().clamp_(0, most)
            codes[:, column] = code.to(torch.uint8)
            error = (block[:, place] - (code - middle) * scale) / inverse[column, column]
            block[:, place:] -= error[:, None] * inverse[column, column : start + block.shape[1]]
            errors[:, place] = error
        weight[:, start + step :] -= errors @ inverse[start : start + block.shape[1], start + step :]
    back = order.argsort()
    group_of = (torch.arange(columns) // size)[back] if act_order else None
    return GroupedMatrix(codes[:, back].contiguous(), scales, torch.full_like(scales, middle), bits, group_of)


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped inverse (section 3.3, step 3), whose rows say how the columns still to
    come make an error good."""
    gram = gram.double()
    # A column that was never anything but 0 may become anything.
    gram.diagonal()[gram.diagonal() == 0] = 1
    mean = gram.diagonal().mean().item()
    for share in _DAMPING:
        damped = gram + share * mean * torch.eye(len(gram), dtype=gram.dtype)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed.item():
            upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
            return upper.float()
    raise EngineError(f"the inputs of a layer of {len(gram)} columns are not finite")
