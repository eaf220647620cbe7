"""Products with float32 weights compared with float64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.fp32 import Linear
from tests.closeness import EPS, assert_rounded, product_bound

SHAPES = [(96, 48), (48, 96), (400, 48), (33, 7), (1, 1), (500, 1537), (1536, 512), (512, 1536)]


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_float64(out: int, into: int, bias: bool) -> None:
    torch.manual_seed(out)
    weight, offset = torch.randn(out, into), torch.randn(out) if bias else None
    linear = Linear(weight.clone(), offset)
    for rows in (*range(1, 71), 250):
        x, residual = torch.randn(rows, into), torch.randn(rows, out)
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        # The added residual is rounded too.
        bound = product_bound(x, weight) + EPS * expected.abs()
        assert_rounded(linear(x), expected, bound)
        assert_rounded(linear.add(x, residual), expected + residual, bound + EPS * (expected + residual).abs())
