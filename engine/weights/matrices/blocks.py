"""Blocks of GGUF files, and of other files whose weights are the same in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf import dequantize as dequantize_blocks
from torch import Tensor

from engine.weights.matrices.grouped import GroupedMatrix
from engine.weights.matrices.nf4 import Nf4Matrix
from engine.weights.matrix import QuantizedMatrix
from kernels.cpu.linear.ggml.packed import PackedBlocks
from kernels.linear import blocks
from kernels.linear.blocks import BlockLinear
from kernels.linear.embedding import BlockEmbedding, Embedding
from kernels.linear.fp32 import Product
from kernels.linear.nf4 import FLOATS_OF_4_BITS, Nf4


@dataclass(frozen=True, slots=True)
class BlockMatrix(QuantizedMatrix):
    """Blocks in a format of GGUF files. Activations are not rounded."""

    kind: GGMLQuantizationType
    blocks: Tensor
    """uint8 ``[out, bytes]``, which may be a part of the mapped file."""
    order: Tensor | None = None
    """int64 ``[out]``, the row of ``blocks`` of each output; ``None``: they are in order."""
    row_scales: Tensor | None = None
    """float32 ``[out]``, by which the outputs are multiplied, in a format that has them (NVFP4); ``None`` for 1."""

    @property
    def shape(self) -> tuple[int, int]:
        block_size, num_bytes = GGML_QUANT_SIZES[self.kind]
        return len(self.blocks if self.order is None else self.order), self.blocks.shape[1] // num_bytes * block_size

    def rows(self) -> Tensor:
        """Return the blocks in the order of the outputs."""
        return self.blocks if self.order is None else self.blocks[self.order]

    def row_addresses(self) -> Tensor:
        """Return the addresses of the rows in memory, int64 ``[out]``."""
        indices = torch.arange(len(self.blocks)) if self.order is None else self.order
        return self.blocks.data_ptr() + self.blocks.stride(0) * indices

    def dense(self) -> Tensor:
        weights = torch.from_numpy(dequantize_blocks(self.rows().numpy(), self.kind))
        return weights if self.row_scales is None else weights * self.row_scales[:, None]

    @classmethod
    def create_cpu_product(cls, parts: Sequence[BlockMatrix], bias: Tensor | None) -> Product | None:
        """Return a product that keeps the bits of the blocks, of the same format or not."""
        return BlockLinear(_pack_blocks(parts), bias) if blocks.is_supported() else None

    def create_cpu_embedding(self) -> Embedding | None:
        return BlockEmbedding(*_pack_blocks([self])) if blocks.is_supported() else None

    def to_gpu_matrix(self) -> GroupedMatrix | Nf4Matrix | Tensor:
        """Return the same weights in groups of 4-bit codes; in float32 if the blocks have minimums or more bits."""
        if self.kind in (GGMLQuantizationType.MXFP4, GGMLQuantizationType.NVFP4):
            return self._to_levels()
        if self.kind != GGMLQuantizationType.Q4_0:
            return self.dense()
        rows = self.rows().view(len(self.blocks), -1, 18)
        scales = rows[..., :2].contiguous().view(torch.float16)[..., 0].float()
        packed = rows[..., 2:]
        codes = torch.cat((packed & 15, packed >> 4), -1).view(len(rows), -1)
        return GroupedMatrix(codes, scales, torch.full_like(scales, 8.0), bits=4)

    def _to_levels(self) -> Nf4Matrix:
        """Return 4-bit floats as codes of 16 levels, with the first of two neighbours in the upper half of a byte."""
        block_size, num_bytes = GGML_QUANT_SIZES[self.kind]
        rows = self.rows().view(self.shape[0], -1, num_bytes)
        num_scales = num_bytes - block_size // 2
        packed = rows[..., num_scales:].reshape(*rows.shape[:2], num_scales, -1)
        pairs = torch.cat((packed & 15, packed >> 4), -1).view(len(rows), -1, 2)
        units = rows.clone()
        units[..., num_scales:] = 1 << 4 | 1  # each weight is its scale times half a unit of the levels
        scales = torch.from_numpy(dequantize_blocks(units.flatten(1).numpy(), self.kind)) * 2
        scales = scales.view(len(rows), -1, block_size // num_scales)[..., 0]
        if self.row_scales is not None:
            scales = scales * self.row_scales[:, None]
        narrow = scales.bfloat16()
        scales = narrow if torch.equal(narrow.float(), scales) else scales
        return Nf4Matrix(Nf4((pairs[..., 0] << 4) | pairs[..., 1], scales.T.contiguous(), FLOATS_OF_4_BITS))


def _pack_blocks(parts: Sequence[BlockMatrix]) -> list[PackedBlocks]:
    """Pack consecutive parts of the same format together, from where they lie in the file."""
    runs = (list(run) for _, run in groupby(parts, lambda part: part.kind))
    return [
        PackedBlocks(
            run[0].kind.name,
            run[0].blocks.shape[1],
            torch.cat([part.row_addresses() for part in run]),
            torch.cat([torch.ones(part.shape[0]) if part.row_scales is None else part.row_scales for part in run]),
        )
        for run in runs
    ]
