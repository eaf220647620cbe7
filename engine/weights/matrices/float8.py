"""Weights of 8-bit floats (e4m3) with a scale for each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.matrix import MATRIX_DEPTH, MATRIX_DEPTH_8BIT, Multiply, QuantizedMatrix
from kernels.common.quantization import Quantization
from kernels.linear.fp8 import BLOCK, find_quantization, fp8_linear
from kernels.linear.weight_only_int8 import int8_weight_linear


@dataclass(frozen=True, slots=True)
class Float8Matrix(QuantizedMatrix):
    """``codes * scales``, with one scale for each block. A block may be a whole row, or the whole matrix."""

    codes: Tensor
    """float8_e4m3fn ``[out, in]``."""
    scales: Tensor
    """float32 ``[ceil(out / block[0]), ceil(in / block[1])]``."""
    block: tuple[int, int]
    """Rows and columns of a block."""
    rounds_activations: bool
    """Round activations to float8, too, with one scale for each block's part of a row."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1]

    def dense(self) -> Tensor:
        return self.codes.float() * self.row_scales().repeat_interleave(self.block[1], 1)[:, : self.codes.shape[1]]

    def row_scales(self) -> Tensor:
        """Return a scale for each row and block of columns, float32 ``[out, blocks]``."""
        return self.scales.repeat_interleave(self.block[0], 0)[: len(self.codes)]

    def can_fuse(self, below: Float8Matrix) -> bool:
        """Return True if both are rounded alike, and no block of the fused matrix has rows of both."""
        rounds, num_blocks = self.rounds_activations, self.scales.shape[1]
        has_row_scales = num_blocks == 1 or not rounds
        return (below.rounds_activations, below.scales.shape[1]) == (rounds, num_blocks) and (
            has_row_scales or len(self.codes) % BLOCK == 0
        )

    def find_missing_kernel(self) -> str | None:
        columns, num_blocks, (height, width) = self.codes.shape[1], self.scales.shape[1], self.block
        size = f"float8 weights of {columns} inputs"
        if self.rounds_activations:
            is_whole = columns % MATRIX_DEPTH_8BIT == 0 if num_blocks == 1 else self.block == (BLOCK, BLOCK)
            if not is_whole or (num_blocks > 1 and columns % BLOCK):
                return f"{size} in blocks of {height} by {width}; {BLOCK} by {BLOCK} and whole rows are supported"
        elif columns % (num_blocks * MATRIX_DEPTH) or columns // num_blocks != min(columns, width):
            return f"{size} in blocks of {width} inputs, which must be multiples of {MATRIX_DEPTH} that divide a row"
        return None

    @classmethod
    def create_gpu_multiply(
        cls, parts: Sequence[Float8Matrix], device: torch.device
    ) -> tuple[Multiply, Quantization | None]:
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).to(device).view(torch.float8_e4m3fn)
        by_row = torch.cat([part.row_scales() for part in parts])
        if not parts[0].rounds_activations:
            groups = by_row.T.contiguous().to(device)
            return lambda x, bias, **options: int8_weight_linear(x, codes, groups, bias, **options), None
        blocks = by_row.flatten() if by_row.shape[1] == 1 else torch.cat([part.scales for part in parts])
        scales = blocks.to(device)
        quantization = find_quantization(codes, scales)
        return lambda x, bias, **options: fp8_linear(x, codes, scales, bias, **options), quantization
