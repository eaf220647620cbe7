"""Weights of few bits, at random, and who can multiply them."""

from __future__ import annotations

import pytest
import torch

from kernels import cpu


def needs_bytes() -> None:
    """Skips the test where the compiled products with whole numbers cannot run."""
    if not cpu.AVAILABLE:
        pytest.skip("needs numba")
    from kernels.cpu.linear_int8 import AVAILABLE

    if not AVAILABLE:
        pytest.skip("needs a processor that multiplies bytes")


def random_int8(out: int, into: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales."""
    return torch.randint(-128, 128, (out, into), dtype=torch.int8), torch.rand(out) / 100
