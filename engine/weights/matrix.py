"""Weight matrices as quantised checkpoints hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from gguf import dequantize as dequantize_blocks
from torch import Tensor

from kernels.linear.nf4 import Nf4, dequantize


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """``codes * scales``, with activations rounded to 8 bits, too, row by row (W8A8)."""

    codes: Tensor
    """int8 ``[out, in]``."""
    scales: Tensor
    """float32 ``[out]``."""

    def dense(self) -> Tensor:
        return self.codes * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """``(codes - zeros) * scales``, where groups of columns share scale and zero. Activations are not rounded."""

    codes: Tensor
    """uint8 ``[out, in]``."""
    scales: Tensor
    """float32 ``[out, groups]``."""
    zeros: Tensor
    """float32 ``[out, groups]``, integers in units of codes."""
    bits: int
    group_of: Tensor | None = None
    """int64 ``[in]``, the group of each column; ``None``: groups of consecutive columns, equally many in each."""

    @property
    def has_equal_groups(self) -> bool:
        """True if all groups have equally many columns."""
        return self.group_of is None or len(set(self.group_of.bincount(minlength=self.scales.shape[1]).tolist())) == 1

    def dense(self) -> Tensor:
        if self.group_of is not None:
            return (self.codes - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]
        groups = self.codes.view(len(self.codes), self.scales.shape[1], -1)
        return ((groups - self.zeros[..., None]) * self.scales[..., None]).view(self.codes.shape)


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """``codes * scales``, with one scale for each block. A block may be a whole row, or the whole matrix."""

    codes: Tensor
    """float8_e4m3fn ``[out, in]``."""
    scales: Tensor
    """float32 ``[ceil(out / block[0]), ceil(in / block[1])]``."""
    block: tuple[int, int]
    """Rows and columns of a block."""
    rounds_activations: bool
    """Round activations to float8, too, with one scale for each block's part of a row."""

    def dense(self) -> Tensor:
        return self.codes.float() * self.row_scales().repeat_interleave(self.block[1], 1)[:, : self.codes.shape[1]]

    def row_scales(self) -> Tensor:
        """Return a scale for each row and block of columns, float32 ``[out, blocks]``."""
        return self.scales.repeat_interleave(self.block[0], 0)[: len(self.codes)]


@dataclass(frozen=True, slots=True)
class Nf4Matrix:
    """NF4: one of 16 levels for each 4-bit code, times the scale of a group. Activations are not rounded."""

    weight: Nf4

    def dense(self) -> Tensor:
        return dequantize(self.weight)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Blocks of a GGUF file. Activations are not rounded."""

    kind: GGMLQuantizationType
    blocks: Tensor
    """uint8 ``[out, bytes]``, a part of the mapped file."""
    order: Tensor | None = None
    """int64 ``[out]``, the row of ``blocks`` of each output; ``None``: they are in order."""

    def rows(self) -> Tensor:
        """Return the blocks in the order of the outputs."""
        return self.blocks if self.order is None else self.blocks[self.order]

    def row_addresses(self) -> Tensor:
        """Return the addresses of the rows in memory, int64 ``[out]``."""
        indices = torch.arange(len(self.blocks)) if self.order is None else self.order
        return self.blocks.data_ptr() + self.blocks.stride(0) * indices

    def dense(self) -> Tensor:
        """Return the weights, float32 ``[out, in]``."""
        return torch.from_numpy(dequantize_blocks(self.rows().numpy(), self.kind))

    def to_groups(self) -> GroupedMatrix | None:
        """Return the same weights in groups of 4-bit codes; ``None`` if the blocks have minimums or more bits."""
        if self.kind != GGMLQuantizationType.Q4_0:
            return None
        blocks = self.rows().view(len(self.blocks), -1, 18)
        scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
        packed = blocks[..., 2:]
        codes = torch.cat((packed & 15, packed >> 4), -1).view(len(blocks), -1)
        return GroupedMatrix(codes, scales, torch.full_like(scales, 8.0), bits=4)


QuantizedMatrix = Int8Matrix | GroupedMatrix | Float8Matrix | Nf4Matrix | BlockMatrix
Matrix = Tensor | QuantizedMatrix
"""A quantised matrix, or float32 weights ``[out, in]``."""


def dense(matrix: Matrix) -> Tensor:
    """Return the weights, float32 ``[out, in]``."""
    return matrix if isinstance(matrix, Tensor) else matrix.dense()


def have_same_groups(matrix: GroupedMatrix, other: GroupedMatrix) -> bool:
    """Return True if both have the same number of bits and the same columns in each group."""
    if matrix.bits != other.bits or matrix.scales.shape[1] != other.scales.shape[1]:
        return False
    if matrix.group_of is None or other.group_of is None:
        return matrix.group_of is other.group_of
    return torch.equal(matrix.group_of, other.group_of)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first axis."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
