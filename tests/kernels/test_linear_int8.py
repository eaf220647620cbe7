"""Products of rows that are rounded to 8 bits with int8 weights, against sums of the same integers in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import cpu
from kernels.linear_int8 import Int8Linear

SHAPES = [(50, 128), (33, 7), (1, 1), (31, 17), (500, 1537), (400, 64), (512, 1536)]


@pytest.fixture(params=["panels", "fbgemm"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "fbgemm":
        monkeypatch.setattr(cpu, "AVAILABLE", False)
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            pytest.skip("needs FBGEMM")
    else:
        needs_panels()


@pytest.fixture
def panels() -> None:
    needs_panels()


def needs_panels() -> None:
    if not cpu.AVAILABLE:
        pytest.skip("needs numba")
    from kernels.cpu.linear_int8 import AVAILABLE

    if not AVAILABLE:
        pytest.skip("needs a processor that multiplies bytes")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_weight(out: int, into: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-128, 128, (out, into), dtype=torch.int8), torch.rand(out) / 100


def defined(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product with the sums of integers in float64, where they are exact, and all else one float32 operation each.

    ``127 / size`` with a tensor, for torch computes a number divided by a tensor with the reciprocal.
    """
    size, levels = x.abs().amax(1, keepdim=True).clamp_min(1e-30), torch.full((len(x), 1), 127.0)
    rounded = (x.double() * (levels / size).double()).round()
    return (rounded @ codes.double().T).float() * scales * (size / levels)


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("layout")
def test_products_are_those_of_rows_rounded_to_127_levels(out: int, into: int, bias: bool) -> None:
    torch.manual_seed(out)
    codes, scales = random_weight(out, into)
    weight, offset = codes.double() * scales.double()[:, None], torch.randn(out)
    linear = Int8Linear(codes, scales, offset if bias else None)
    assert linear.parameters == out * into + (out if bias else 0)
    if not bias:
        offset.zero_()
    for rows in (1, 7, 40):
        # Rows of 127 levels of very different sizes: each is rounded to itself, if each has a scale of its own.
        x = torch.randint(-127, 128, (rows, into)).float()
        x[:, into // 2] = -127
        x *= 2.0 ** torch.arange(-20, 20)[:rows, None]
        residual = torch.randn(rows, out)
        expected = x.double() @ weight.T + offset
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(linear.add(x, residual).double(), expected + residual, atol=1e-5, rtol=1e-5)
    x = torch.randn(40, into)
    expected = x.double() @ weight.T + offset
    assert (linear(x) - expected).norm() / expected.norm() < 0.015


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.usefixtures("panels")
def test_sums_are_exact(out: int, into: int) -> None:
    """To the last bit of the result, with and without what is added to it."""
    torch.manual_seed(out)
    codes, scales = random_weight(out, into)
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


@pytest.mark.usefixtures("panels")
def test_the_largest_sums_do_not_overflow() -> None:
    into = 65536
    codes = torch.tensor([-128, -127, 127], dtype=torch.int8)[:, None].expand(3, into)
    linear = Int8Linear(codes, torch.ones(3))
    x = torch.tensor([[127.0], [-127.0]]).expand(2, into)
    assert torch.equal(linear(x), torch.tensor([[-128.0, -127, 127], [128, 127, -127]]) * 127 * into)
    # Half of it cancels the other half but for one product.
    x = x.clone()
    x[0, : into // 2 + 1] = -127
    assert linear(x)[0].tolist() == [2 * 127 * 128, 2 * 127 * 127, -2 * 127 * 127]


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.usefixtures("layout")
def test_a_row_of_the_result_does_not_depend_on_the_other_rows(out: int, into: int) -> None:
    """Bit for bit, wherever the row stands in whatever batch."""
    torch.manual_seed(into)
    linear = Int8Linear(*random_weight(out, into), torch.randn(out))
    x, residual = torch.randn(200, into) * torch.logspace(-2, 2, 200)[:, None], torch.randn(200, out)
    whole, added = linear(x), linear.add(x, residual)
    for rows in (*range(1, 41), 64, 111, 112, 113, 129):
        for start in (0, 71 - rows % 7):
            part = slice(start, start + rows)
            assert torch.equal(linear(x[part]), whole[part])
            assert torch.equal(linear.add(x[part], residual[part]), added[part])


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.usefixtures("layout", "threads")
def test_the_number_of_threads_changes_no_bit(out: int, into: int) -> None:
    torch.manual_seed(into)
    linear, x = Int8Linear(*random_weight(out, into), torch.randn(out)), torch.randn(130, into)
    torch.set_num_threads(1)
    alone = [linear(x[:rows]) for rows in (1, 2, 17, 130)]
    for count in (2, 3):
        torch.set_num_threads(count)
        for result in alone:
            assert torch.equal(linear(x[: len(result)]), result)


@pytest.mark.usefixtures("layout")
def test_a_row_of_zeros_gives_zeros() -> None:
    x = torch.zeros(3, 128)
    x[1] = 1
    assert not Int8Linear(*random_weight(50, 128))(x)[[0, 2]].any()


@pytest.mark.usefixtures("panels")
def test_what_is_not_finite_stays_in_its_row_and_is_seen_there() -> None:
    torch.manual_seed(0)
    linear, x = Int8Linear(*random_weight(70, 50)), torch.randn(20, 50)
    clean = linear(x)
    x[7, 49], x[11, 0], x[12, 49] = torch.inf, torch.nan, -torch.nan
    spoilt = linear(x)
    others = [row for row in range(20) if row not in (7, 11, 12)]
    assert torch.equal(spoilt[others], clean[others])
    assert not spoilt[[7, 11, 12]].isfinite().any()


@pytest.mark.usefixtures("layout")
def test_x_and_the_residual_may_be_parts_of_other_tensors() -> None:
    torch.manual_seed(0)
    linear, wide, long = Int8Linear(*random_weight(70, 50)), torch.randn(20, 60), torch.randn(60, 20)
    residual = torch.randn(20, 100)[:, 30:]
    for x in (wide[:, 7:57], wide[::2, :50], wide[5:6, 10:], long[10:].T, wide[:1].expand(20, 60)[:, :50]):
        copy, beside = x.contiguous(), residual[: len(x)]
        assert torch.equal(linear(x), linear(copy))
        assert torch.equal(linear.add(x, beside), linear.add(copy, beside.contiguous()))


@pytest.mark.usefixtures("panels")
def test_no_rows_give_none() -> None:
    assert Int8Linear(*random_weight(70, 50))(torch.randn(0, 50)).shape == (0, 70)


@pytest.mark.parametrize("x", [torch.zeros(3, 49), torch.zeros(3, 50, dtype=torch.bfloat16)])
@pytest.mark.usefixtures("layout")
def test_what_does_not_fit_the_weights_is_refused(x: torch.Tensor) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        Int8Linear(*random_weight(70, 50))(x)


@pytest.mark.usefixtures("panels")
def test_a_residual_that_does_not_fit_the_product_is_refused() -> None:
    with pytest.raises(ValueError, match="residual"):
        Int8Linear(*random_weight(70, 50)).add(torch.zeros(3, 50), torch.zeros(3, 69))


@pytest.mark.usefixtures("layout")
def test_more_columns_than_an_integer_surely_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="65537 columns"):
        Int8Linear(torch.zeros(1, 65537, dtype=torch.int8), torch.ones(1))
