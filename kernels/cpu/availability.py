"""Kernels that numba compiles for the processor at hand. Each has a reference in torch or numpy operators, which also
does its work where numba is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

AVAILABLE = find_spec("numba") is not None
"""Whether the modules of this package can be imported; but those of n-grams are also plain Python."""


def computes(*tensors: Tensor) -> bool:
    """Whether kernels take them: float32 on the CPU, without a gradient to be kept."""
    return AVAILABLE and all(
        one.device.type == "cpu" and one.dtype is torch.float32 and not one.requires_grad for one in tensors
    )


def multiplies_bytes() -> bool:
    """Whether there are kernels for products with whole numbers."""
    if not AVAILABLE:
        return False
    from kernels.cpu.linear.gemm_tile import MULTIPLIES_BYTES

    return MULTIPLIES_BYTES
