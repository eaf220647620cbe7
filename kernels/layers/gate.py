"""Sigmoid gates of attention and of shared experts.

A row of the result of the kernel does not depend on the other rows, to the bit. Torch's does: its vectors and what is
left behind the last of them round differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.layers import gate as on_cpu


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return ``sigmoid(gate) * x`` in the shape of ``x``, ``[rows, n]``. ``gate``: the same shape, or ``[rows, 1]``."""
    if gate.is_cuda:
        from kernels.triton import activation as on_gpu

        return on_gpu.scale_rows(gate, x, silu=False)
    if can_use_kernels(gate, x):
        return on_cpu.sigmoid_mul(gate, x)
    return torch.sigmoid(gate) * x
