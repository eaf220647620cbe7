"""Products of rows rounded to 8 bits with 4-bit weights, compared with sums of the same integers in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu import availability
from kernels.linear.int4 import Int4Linear
from tests.closeness import EPS, assert_rounded
from tests.kernels.layouts import random_int4, require_byte_products
from tests.seeds import shift

SHAPES = [(32, 16, 16), (33, 64, 32), (31, 48, 16), (1, 32, 32), (400, 64, 64), (100, 512, 256), (70, 1536, 128)]
"""Outputs, inputs, and columns of a group."""


@pytest.fixture
def panels() -> None:
    require_byte_products()


@pytest.fixture(params=["panels", "operator"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "panels":
        require_byte_products()
    else:
        monkeypatch.setattr(availability, "HAS_BYTE_PRODUCTS", False)


def weight(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the dequantized weights in float64."""
    groups = codes.double().view(*scales.shape, -1)
    return ((groups - zeros.double()[..., None]) * scales.double()[..., None]).view(codes.shape)


def rounded(x: Tensor, size: int) -> Tensor:
    """Return the rounded rows in float64. ``127 / most`` has a tensor operand because torch divides a number by a
    tensor with the reciprocal.
    """
    groups = x.view(len(x), -1, size)
    most = groups.abs().amax(2, keepdim=True).clamp_min(1e-30)
    levels = torch.full_like(most, 127)
    return ((groups.double() * (levels / most).double()).round() * (most / levels).double()).view(x.shape)


@pytest.mark.parametrize(("out", "into", "size"), SHAPES)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.usefixtures("panels")
def test_sums_within_groups_are_exact(out: int, into: int, size: int, ordered: bool) -> None:
    """Scales are powers of 2 and rounding leaves each group of x unchanged, so float32 holds every sum."""
    torch.manual_seed(shift(out))
    codes, scales, zeros = random_int4(out, into, size)
    scales, groups = 2.0 ** torch.randint(-1, 2, scales.shape), scales.shape[1]
    order = torch.randperm(into) if ordered else None
    linear, right = Int4Linear(codes, scales, zeros, None, order), weight(codes, scales, zeros)
    for rows in (*range(1, 41), 113, 250):
        x = torch.randint(-127, 128, (rows, groups, size)).float()
        x[..., size // 2] = -127
        x = (x * 2.0 ** torch.randint(-1, 2, (rows, groups, 1))).view(rows, into)
        given = x if order is None else torch.empty_like(x).index_copy_(1, order, x)
        expected, residual = x.double() @ right.T, torch.randint(-9, 9, (rows, out)).float()
        assert torch.equal(linear(given).double(), expected)
        assert torch.equal(linear.add(given, residual), expected.float() + residual)


@pytest.mark.parametrize(("out", "into", "size"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("panels")
def test_products_equal_those_of_groups_rounded_to_127_levels(out: int, into: int, size: int, bias: bool) -> None:
    torch.manual_seed(shift(out))
    codes, scales, zeros = random_int4(out, into, size)
    offset = torch.randn(out) if bias else torch.zeros(out)
    linear, right = Int4Linear(codes, scales, zeros, offset if bias else None), weight(codes, scales, zeros)
    for rows in (1, 7, 40):
        x, residual = torch.randn(rows, into) * torch.logspace(-3, 3, rows)[:, None], torch.randn(rows, out)
        x[rows // 3, :size] = 0
        near = rounded(x, size)
        expected = near @ right.T + offset
        # One rounding for each group, and some for its scales, its unit and the residual.
        least = (scales.shape[1] + 8) * EPS / 2 * (near.abs() @ right.abs().T + offset.abs() + residual.abs())
        assert ((linear(x) - expected).abs() <= least).all()
        assert ((linear.add(x, residual) - (expected + residual)).abs() <= least).all()


@pytest.mark.usefixtures("panels")
def test_the_largest_sums_do_not_overflow() -> None:
    for code, zero in ((15, 0), (0, 16), (15, 16), (0, 0)):
        codes = torch.full((40, 512), code, dtype=torch.uint8)
        linear = Int4Linear(codes, torch.ones(40, 2), torch.full((40, 2), float(zero)))
        x = torch.tensor([[127.0], [-127.0]]).expand(2, 512)
        expected = (code - zero) * 127 * 512 * torch.tensor([[1.0], [-1.0]]).expand(2, 40)
        assert torch.equal(linear(x), expected)


@pytest.mark.usefixtures("panels")
def test_groups_of_many_columns_are_split() -> None:
    """A group may be a whole row, for one scale per output."""
    torch.manual_seed(shift(0))
    codes, scales, zeros = random_int4(50, 1536, 1536)
    x, right = torch.randn(5, 1536), weight(codes, scales, zeros)
    near = rounded(x, 256)
    bound = (6 + 8) * EPS / 2 * (near.abs() @ right.abs().T)
    assert_rounded(Int4Linear(codes, scales, zeros)(x), near @ right.T, bound)


@pytest.mark.parametrize(("out", "into"), [(50, 128), (400, 64), (512, 1536)])
@pytest.mark.usefixtures("layout")
def test_rounding_activations_changes_the_product_little(out: int, into: int) -> None:
    torch.manual_seed(shift(out))
    codes, scales, zeros = random_int4(out, into, 32)
    scales, offset, order = scales.bfloat16().float(), torch.randn(out), torch.randperm(into)
    linear, right = Int4Linear(codes, scales, zeros, offset, order), weight(codes, scales, zeros)
    for rows in (1, 7, 40):
        x, residual = torch.randn(rows, into), torch.randn(rows, out)
        expected = x[:, order].double() @ right.T + offset
        for found, wanted in ((linear(x), expected), (linear.add(x, residual), expected + residual)):
            assert found.dtype == torch.float32
            # The largest of a group of 32 is 2 to 3 deviations, so one of the 127 levels is 1/50 of a deviation, and
            # rounding to it is 0.3 levels: 0.6 %. The operator rounds whole rows or to bfloat16 (2^-9, 0.2 to 0.4 %).
            assert (found - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.usefixtures("layout")
def test_unsupported_group_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="120 columns in 5 groups"):
        Int4Linear(torch.zeros(16, 120, dtype=torch.uint8), torch.ones(16, 5), torch.ones(16, 5))
