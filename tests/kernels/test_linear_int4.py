"""Products with 4-bit weights against their definition in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear_int4 import Int4Linear

SHAPES = [(50, 128), (400, 64), (512, 1536)]
ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 129)


def int4(out: int, into: int, bias: bool) -> tuple[Int4Linear, torch.Tensor, torch.Tensor]:
    codes, scales = torch.randint(0, 16, (out, into), dtype=torch.uint8), torch.rand(out, into // 32) / 10
    scales, zeros = scales.bfloat16().float(), torch.randint(0, 16, scales.shape).float()
    offset = torch.randn(out) if bias else torch.zeros(out)
    wide = [one.double().repeat_interleave(32, 1) for one in (scales, zeros)]
    return Int4Linear(codes, scales, zeros, offset if bias else None), (codes.double() - wide[1]) * wide[0], offset


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_float64_but_for_bfloat16(out: int, into: int, bias: bool) -> None:
    torch.manual_seed(out)
    linear, weight, offset = int4(out, into, bias)
    assert linear.parameters == out * into + (out if bias else 0)
    for rows in (1, 7, 40):
        x, residual = torch.randn(rows, into), torch.randn(rows, out)
        expected = x.double() @ weight.T + offset
        for found, right in ((linear(x), expected), (linear.add(x, residual), expected + residual)):
            assert found.dtype == torch.float32
            assert (found - right).norm() / right.norm() < 5e-3


@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_a_row_of_the_result_does_not_depend_on_the_other_rows(out: int, into: int) -> None:
    """Bit for bit, wherever the row stands in whatever batch."""
    torch.manual_seed(into)
    linear, _, _ = int4(out, into, False)
    x, residual = torch.randn(200, into) * torch.logspace(-2, 2, 200)[:, None], torch.randn(200, out)
    whole, added = linear(x), linear.add(x, residual)
    for rows in ROWS:
        for start in (0, 71 - rows % 7):
            part = slice(start, start + rows)
            assert torch.equal(linear(x[part]), whole[part])
            assert torch.equal(linear.add(x[part], residual[part]), added[part])


def test_groups_that_the_operator_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16 of 64 columns"):
        Int4Linear(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 4), torch.ones(16, 4))
