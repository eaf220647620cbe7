"""Products with weights that are laid out once, against float64's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import cpu
from kernels.linear import Linear

SHAPES = [(96, 48), (48, 96), (400, 48), (33, 7), (1, 1), (500, 1537), (1536, 512), (512, 1536)]


@pytest.fixture(params=["panels", "onednn"], autouse=True)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "onednn":
        monkeypatch.setattr(cpu, "AVAILABLE", False)
    elif not cpu.AVAILABLE:
        pytest.skip("needs numba")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_float64(out: int, into: int, bias: bool) -> None:
    torch.manual_seed(out)
    weight, offset = torch.randn(out, into), torch.randn(out) if bias else None
    linear = Linear(weight.clone(), offset)
    assert linear.parameters == out * into + (out if bias else 0)
    for rows in (*range(1, 71), 250):
        x, residual = torch.randn(rows, into), torch.randn(rows, out)
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(linear.add(x, residual).double(), expected + residual, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_a_row_of_the_result_does_not_depend_on_the_other_rows(out: int, into: int) -> None:
    """Bit for bit, wherever the row stands in whatever batch."""
    torch.manual_seed(into)
    linear, x, residual = (
        Linear(torch.randn(out, into), torch.randn(out)),
        torch.randn(200, into),
        torch.randn(200, out),
    )
    whole, added = linear(x), linear.add(x, residual)
    for rows in (*range(1, 36), 64, 111, 112, 113, 129):
        for start in (0, 71 - rows % 7):
            part = slice(start, start + rows)
            assert torch.equal(linear(x[part]), whole[part])
            assert torch.equal(linear.add(x[part], residual[part]), added[part])


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_no_bit(out: int, into: int) -> None:
    torch.manual_seed(into)
    linear, x = Linear(torch.randn(out, into), torch.randn(out)), torch.randn(130, into)
    torch.set_num_threads(1)
    alone = [linear(x[:rows]) for rows in (1, 2, 17, 130)]
    for count in (2, 3):
        torch.set_num_threads(count)
        for result in alone:
            assert torch.equal(linear(x[: len(result)]), result)


def test_what_is_not_finite_stays_in_its_row() -> None:
    torch.manual_seed(0)
    linear, x = Linear(torch.randn(70, 50)), torch.randn(20, 50)
    clean = linear(x)
    x[7, 49], x[11, 0] = torch.inf, torch.nan
    spoilt = linear(x)
    others = [row for row in range(20) if row not in (7, 11)]
    assert torch.equal(spoilt[others], clean[others])
    assert not spoilt[[7, 11]].isfinite().any()


def test_x_and_the_residual_may_be_parts_of_other_tensors() -> None:
    torch.manual_seed(0)
    linear, wide, long = Linear(torch.randn(70, 50)), torch.randn(20, 60), torch.randn(60, 20)
    residual = torch.randn(20, 100)[:, 30:]
    for x in (wide[:, 7:57], wide[::2, :50], wide[5:6, 10:], long[10:].T, wide[:1].expand(20, 60)[:, :50]):
        copy, beside = x.contiguous(), residual[: len(x)]
        assert torch.equal(linear(x), linear(copy))
        assert torch.equal(linear.add(x, beside), linear.add(copy, beside.contiguous()))


def test_no_rows_give_none() -> None:
    assert Linear(torch.randn(70, 50))(torch.randn(0, 50)).shape == (0, 70)


@pytest.mark.parametrize("x", [torch.zeros(3, 49), torch.zeros(3, 50, dtype=torch.bfloat16)])
def test_what_does_not_fit_the_weights_is_refused(x: torch.Tensor) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        Linear(torch.randn(70, 50))(x)


def test_a_residual_that_does_not_fit_the_product_is_refused() -> None:
    if not cpu.AVAILABLE:
        pytest.skip("oneDNN does not look")
    linear = Linear(torch.randn(70, 50))
    with pytest.raises(ValueError, match="residual"):
        linear.add(torch.zeros(3, 50), torch.zeros(3, 69))
