"""Weights of few bits, at random, and who can multiply them."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import availability


def needs_bytes() -> None:
    """Skips the test where the compiled products with whole numbers cannot run."""
    if not availability.HAS_INT8_DOT:
        pytest.skip("needs numba and a processor that multiplies bytes")


def random_int8(out: int, into: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales."""
    return torch.randint(-128, 128, (out, into), dtype=torch.int8), torch.rand(out) / 100


def random_int4(out: int, into: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and zeros of groups of ``size`` columns."""
    groups = into // size
    codes = torch.randint(0, 16, (out, into), dtype=torch.uint8)
    return codes, torch.rand(out, groups) / 10, torch.randint(0, 17, (out, groups)).float()
