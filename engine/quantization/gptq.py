"""GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323): round column by column, compensating each error in the
columns still to be rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.protocol.types import EngineError
from engine.quantization.rounding import compute_symmetric_scales
from engine.weights.matrices.grouped import GroupedMatrix

_DAMPING = (0.01, 0.1, 1.0)
"""Fractions of the mean diagonal added to it: the paper's, then those tried if that is not enough."""
_BLOCK = 128
"""Columns whose errors are applied to the columns behind them as one product (section 3.3, step 2)."""


def round_gptq(weight: Tensor, gram: Tensor, bits: int, size: int, *, act_order: bool = True) -> GroupedMatrix:
    """Round ``weight`` ``[out, in]`` so that products with its inputs change least.

    ``gram``: ``[in, in]``, sum of ``x xᵀ`` over the inputs. ``size``: columns of a group. ``act_order``: round columns
    with the largest inputs first; groups are then consecutive in that order.
    """
    rows, columns = weight.shape
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    weight, inverse = weight[:, order].clone(), _inverse_factor(gram[order][:, order])
    max_code, middle = (1 << bits) - 1, 1 << (bits - 1)
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, columns // size)
    # Blocks are parts of groups or consist of whole ones, so that a group's scale is that of its corrected weights.
    step = size if size > _BLOCK else _BLOCK // size * size
    for start in range(0, columns, step):
        block = weight[:, start : start + step]
        errors = torch.empty_like(block)
        for index in range(block.shape[1]):
            column = start + index
            group = column // size
            if column % size == 0:
                scales[:, group] = compute_symmetric_scales(block[:, index : index + size], bits)
            scale = scales[:, group]
            code = (block[:, index] / scale + middle).round_().clamp_(0, max_code)
            codes[:, column] = code.to(torch.uint8)
            error = (block[:, index] - (code - middle) * scale) / inverse[column, column]
            block[:, index:] -= error[:, None] * inverse[column, column : start + block.shape[1]]
            errors[:, index] = error
        weight[:, start + step :] -= errors @ inverse[start : start + block.shape[1], start + step :]
    inverse_order = order.argsort()
    group_of = (torch.arange(columns) // size)[inverse_order] if act_order else None
    return GroupedMatrix(
        codes[:, inverse_order].contiguous(),
        scales,
        zeros=torch.full_like(scales, middle),
        bits=bits,
        group_of=group_of,
    )


def _inverse_factor(gram: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the damped inverse (section 3.3, step 3).

    Its rows say how an error is compensated in the columns still to be rounded.
    """
    gram = gram.double()
    # A column whose inputs are all 0 may be rounded to anything.
    gram.diagonal()[gram.diagonal() == 0] = 1
    mean = gram.diagonal().mean().item()
    for fraction in _DAMPING:
        damped = gram + fraction * mean * torch.eye(len(gram), dtype=gram.dtype)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed.item():
            upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
            return upper.float()
    raise EngineError(f"the inputs of a layer of {len(gram)} columns are not finite")
