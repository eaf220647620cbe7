"""The properties read from compiled kernels are correct."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.kernels.triton.hopper import compiling


@triton.jit
def _dot(a, b, c, n: tl.constexpr):
    row, column = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    x, y = tl.load(a + row * n + column), tl.load(b + row * n + column)
    tl.store(c + row * n + column, tl.dot(x, y))


def test_a_product_uses_the_matrix_units_and_wide_loads() -> None:
    a, c = torch.empty(64, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, 64, device="meta")
    with compiling() as made:
        _dot[(1,)](a, a, c, 64)
    [kernel] = made
    assert kernel.count("HGMMA") > 0, kernel
    assert kernel.count("LDG", ".128") > 0, kernel
    assert kernel.spills == kernel.stack == 0
    assert 0 < kernel.registers <= 255
    assert 0 < kernel.occupancy <= 1


def test_spilled_registers_are_detected() -> None:
    a, c = torch.empty(64, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, 64, device="meta")
    with compiling() as made:
        _dot[(1,)](a, a, c, 64, num_warps=1, maxnreg=32)
    [kernel] = made
    assert kernel.registers <= 32
    assert kernel.spills > 0
    assert kernel.stack > 0
