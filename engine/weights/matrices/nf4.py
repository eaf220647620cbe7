"""Weights of 16 levels: NF4 of bitsandbytes, and on a GPU other 4-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.weights.matrix import Multiply, QuantizedMatrix, stack
from kernels.common.quantization import Quantization
from kernels.linear.nf4 import Nf4, Nf4Product, dequantize


@dataclass(frozen=True, slots=True)
class Nf4Matrix(QuantizedMatrix):
    """One of 16 levels for each 4-bit code, times the scale of a group. Activations are not rounded."""

    weight: Nf4

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.weight.packed), 2 * self.weight.packed.shape[1]

    def dense(self) -> Tensor:
        return dequantize(self.weight)

    def can_fuse(self, below: Nf4Matrix) -> bool:
        same_groups = len(self.weight.scales) == len(below.weight.scales)
        return same_groups and self.weight.levels == below.weight.levels

    @classmethod
    def create_gpu_multiply(
        cls, parts: Sequence[Nf4Matrix], device: torch.device
    ) -> tuple[Multiply, Quantization | None]:
        packed = stack([part.weight.packed for part in parts]).to(device)
        scales = torch.cat([part.weight.scales for part in parts], dim=1).to(device)
        return Nf4Product(Nf4(packed, scales, parts[0].weight.levels)), None
