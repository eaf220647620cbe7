"""Products of rows rounded to 8 bits with int8 weights, compared with sums of the same integers in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.int8 import Int8Linear
from tests.closeness import EPS, assert_rounded
from tests.kernels.layouts import random_int8, require_byte_products
from tests.seeds import shift

SHAPES = [(50, 128), (33, 7), (1, 1), (31, 17), (500, 1537), (400, 64), (512, 1536)]


@pytest.fixture(autouse=True)
def panels() -> None:
    require_byte_products()


def defined(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the product with integer sums in float64, where they are exact, and float32 operations elsewhere.

    ``127 / size`` has a tensor operand because torch divides a number by a tensor with the reciprocal.
    """
    size, levels = x.abs().amax(1, keepdim=True).clamp_min(1e-30), torch.full((len(x), 1), 127.0)
    rounded = (x.double() * (levels / size).double()).round()
    return (rounded @ codes.double().T).float() * scales * (size / levels)


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_those_of_rows_rounded_to_127_levels(out: int, into: int, bias: bool) -> None:
    torch.manual_seed(shift(out))
    codes, scales = random_int8(out, into)
    weight, offset = codes.double() * scales.double()[:, None], torch.randn(out)
    linear = Int8Linear(codes, scales, offset if bias else None)
    if not bias:
        offset.zero_()
    for rows in (1, 7, 40):
        # Rows of 127 levels of very different sizes: rounding leaves each unchanged if each has a scale of its own.
        x = torch.randint(-127, 128, (rows, into)).float()
        x[:, into // 2] = -127
        x *= 2.0 ** torch.arange(-20, 20)[:rows, None]
        residual = torch.randn(rows, out)
        product = x.double() @ weight.T
        # The sums are exact; the scales of columns and rows, the offset and the residual are a rounding each.
        bound = 4 * EPS * (product.abs() + offset.abs() + residual.abs())
        assert_rounded(linear(x), product + offset, bound)
        assert_rounded(linear.add(x, residual), product + offset + residual, bound)
    x = torch.randn(40, into)
    expected = x.double() @ weight.T + offset
    # The largest of up to 1537 is 3 to 4 deviations: one level is 1/40 of a deviation, and rounding to it 0.3 levels.
    assert (linear(x) - expected).norm() / expected.norm() < 0.015


@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_integer_sums_are_exact(out: int, into: int) -> None:
    """Results are bit-identical, with and without a residual."""
    torch.manual_seed(shift(out))
    codes, scales = random_int8(out, into)
    offset = torch.randn(out)
    plain, linear = Int8Linear(codes, scales), Int8Linear(codes, scales, offset)
    for rows in (*range(1, 41), 113, 250):
        x, residual = torch.randn(rows, into) * torch.logspace(-9, 9, rows)[:, None], torch.randn(rows, out)
        x[rows // 3] = 0
        expected = defined(codes, scales, x)
        assert torch.equal(plain(x), expected)
        assert torch.equal(plain.add(x, residual), expected + residual)
        assert torch.equal(linear(x), expected + offset)
        assert torch.equal(linear.add(x, residual), expected + offset + residual)


def test_the_largest_sums_do_not_overflow() -> None:
    into = 65536
    codes = torch.tensor([-128, -127, 127], dtype=torch.int8)[:, None].expand(3, into)
    linear = Int8Linear(codes, torch.ones(3))
    x = torch.tensor([[127.0], [-127.0]]).expand(2, into)
    assert torch.equal(linear(x), torch.tensor([[-128.0, -127, 127], [128, 127, -127]]) * 127 * into)
    # One half cancels the other except for one product.
    x = x.clone()
    x[0, : into // 2 + 1] = -127
    assert linear(x)[0].tolist() == [2 * 127 * 128, 2 * 127 * 127, -2 * 127 * 127]


def test_too_many_columns_for_32_bit_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="65537 columns"):
        Int8Linear(torch.zeros(1, 65537, dtype=torch.int8), torch.ones(1))
