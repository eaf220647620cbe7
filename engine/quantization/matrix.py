"""A weight matrix as a quantised checkpoint holds it, and the product that computes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.device import HOST, Placement
from kernels import linear_int4, linear_int8
from kernels.linear import Linear, Product
from kernels.linear_int4 import Int4Linear
from kernels.linear_int8 import Int8Linear


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """``codes * scales``; activations are meant to be rounded to 8 bits too, row by row (W8A8)."""

    codes: Tensor
    """int8 ``[out, in]``."""
    scales: Tensor
    """float32 ``[out]``."""

    def dense(self) -> Tensor:
        """The weights, float32 ``[out, in]``."""
        return self.codes * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """``(codes - zeros) * scales``, columns in groups that share scale and zero. Activations stay as they are."""

    codes: Tensor
    """uint8 ``[out, in]``."""
    scales: Tensor
    """float32 ``[out, groups]``."""
    zeros: Tensor
    """float32 ``[out, groups]``, in units of codes."""
    bits: int
    group_of: Tensor | None = None
    """int64 ``[in]``: the group of each column; ``None``: consecutive columns, equally many for each."""

    def dense(self) -> Tensor:
        """The weights, float32 ``[out, in]``."""
        if self.group_of is not None:
            return (self.codes - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]
        groups = self.codes.view(len(self.codes), self.scales.shape[1], -1)
        return ((groups - self.zeros[..., None]) * self.scales[..., None]).view(self.codes.shape)


Matrix = Tensor | Int8Matrix | GroupedMatrix
"""Weights in float32, or as a quantised checkpoint holds them."""


def dense(matrix: Matrix) -> Tensor:
    """The weights, float32 ``[out, in]``."""
    return matrix if isinstance(matrix, Tensor) else matrix.dense()


def product(parts: Sequence[Matrix], bias: Tensor | None = None, place: Placement = HOST) -> Product:
    """The product with matrices of the same input, one below the other. On a GPU in the type of ``place``, also where
    the checkpoint has fewer bits; on a CPU in the layout that is fastest there:

    - W8A8 in every part: int8, which wins for every shape and number of rows.
    - 4 bits in groups that the operator knows: packed int4, which wins up to 16 rows and costs an eighth of the memory.
    - Anything else: float32. No operator of torch's beats it there without rounding activations that the checkpoint
      does not want rounded.
    """
    if place.on_gpu:
        dense_parts = [place.put(dense(part)) for part in parts]
        return Linear(_stack(dense_parts), None if bias is None else place.put(bias))
    first = parts[0]
    if isinstance(first, Int8Matrix) and linear_int8.supported(first.codes.shape[1]):
        ints = [part for part in parts if isinstance(part, Int8Matrix)]
        if len(ints) == len(parts):
            return Int8Linear(_stack([part.codes for part in ints]), _stack([part.scales for part in ints]), bias)
    if isinstance(first, GroupedMatrix) and _packable(first):
        grouped = [part for part in parts if isinstance(part, GroupedMatrix) and _alike(part, first)]
        if len(grouped) == len(parts):
            codes, order = _stack([part.codes for part in grouped]), None
            if first.group_of is not None:
                order = first.group_of.argsort(stable=True)
                codes = codes[:, order]
            scales, zeros = _stack([part.scales for part in grouped]), _stack([part.zeros for part in grouped])
            return Int4Linear(codes, scales, zeros, bias, order)
    return Linear(_stack([dense(part) for part in parts]), bias)


def _packable(matrix: GroupedMatrix) -> bool:
    columns, groups = matrix.codes.shape[1], matrix.scales.shape[1]
    size = columns // groups
    equal = matrix.group_of is None or bool((matrix.group_of.bincount(minlength=groups) == size).all())
    return matrix.bits == 4 and equal and linear_int4.supported(columns, size)


def _alike(matrix: GroupedMatrix, other: GroupedMatrix) -> bool:
    """Whether both have 4 bits and the same columns in each group."""
    if matrix.bits != other.bits or matrix.scales.shape[1] != other.scales.shape[1]:
        return False
    if matrix.group_of is None or other.group_of is None:
        return matrix.group_of is other.group_of
    return torch.equal(matrix.group_of, other.group_of)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
