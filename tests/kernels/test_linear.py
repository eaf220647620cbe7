"""Packed products against plain ones."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import Linear

SHAPES = [(96, 48), (48, 96), (400, 48), (1536, 512), (512, 1536)]


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_float64(out: int, into: int, bias: bool) -> None:
    torch.manual_seed(out)
    weight, offset = torch.randn(out, into), torch.randn(out) if bias else None
    linear = Linear(weight.clone(), offset)
    assert linear.parameters == out * into + (out if bias else 0)
    for rows in (1, 2, 7, 40):
        x, residual = torch.randn(rows, into), torch.randn(rows, out)
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(linear.add(x, residual).double(), expected + residual, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_a_row_of_the_result_does_not_depend_on_the_other_rows(out: int, into: int) -> None:
    """Bit for bit, wherever the row stands in whatever batch."""
    torch.manual_seed(into)
    linear, x, residual = Linear(torch.randn(out, into)), torch.randn(200, into), torch.randn(200, out)
    whole, added = linear(x), linear.add(x, residual)
    for rows in (1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 129):
        for start in (0, 71 - rows % 7):
            part = slice(start, start + rows)
            assert torch.equal(linear(x[part]), whole[part])
            assert torch.equal(linear.add(x[part], residual[part]), added[part])
