"""Products with float32 weights compared with float64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.fp32 import Linear
from tests.closeness import EPS, assert_rounded, product_bound
from tests.seeds import shift

SHAPES = [(96, 48), (48, 96), (400, 48), (33, 7), (1, 1), (500, 1537), (1536, 512), (512, 1536)]


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_float64(out: int, into: int, bias: bool) -> None:
    torch.manual_seed(shift(out))
    weight, offset = torch.randn(out, into), torch.randn(out) if bias else None
    linear = Linear(weight.clone(), offset)
    x, residual = torch.randn(250, into), torch.randn(250, out)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    # The sums with the bias and with the residual are rounded too.
    bound = product_bound(x, weight) + EPS * expected.abs()
    added, added_bound = expected + residual, bound + EPS * (expected + residual).abs()
    for rows in (*range(1, 71), 250):
        assert_rounded(linear(x[:rows]), expected[:rows], bound[:rows])
        assert_rounded(linear.add(x[:rows], residual[:rows]), added[:rows], added_bound[:rows])


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_of_narrow_floats_is_returned_as_it_is_accumulated(has_bias: bool) -> None:
    torch.manual_seed(shift(3))
    weight, x = torch.randn(300, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    bias = torch.randn(300).bfloat16() if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    product = Linear(weight, bias)
    found = product.to_float32(x)
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) < 1e-4
    assert float((product(x).float() - exact).abs().max()) > 1e-2  # what rounding to bfloat16 costs


def test_on_a_gpu_the_product_itself_returns_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def mm(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        return x.to(out_dtype) @ weight.to(out_dtype)

    weight, x, bias = torch.randn(30, 8).bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(30).bfloat16()
    expected = Linear(weight, bias).to_float32(x)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    torch.testing.assert_close(Linear(weight, bias).to_float32(x), expected)


def test_float32_is_computed_as_before() -> None:
    weight, x = torch.randn(30, 8), torch.randn(4, 8)
    product = Linear(weight)
    assert torch.equal(product.to_float32(x), product(x))
