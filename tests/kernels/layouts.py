"""Random quantized weights, and a skip of tests that need products of bytes."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import availability


def require_byte_products() -> None:
    """Skip the test if the integer kernels cannot run."""
    if not availability.HAS_BYTE_PRODUCTS:
        pytest.skip("needs a processor with AVX2 or ARM's dot products")


def random_int8(out: int, into: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales."""
    return torch.randint(-128, 128, (out, into), dtype=torch.int8), torch.rand(out) / 100


def random_int4(out: int, into: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and zeros of groups of ``size`` columns."""
    groups = into // size
    codes = torch.randint(0, 16, (out, into), dtype=torch.uint8)
    return codes, torch.rand(out, groups) / 10, torch.randint(0, 17, (out, groups)).float()
