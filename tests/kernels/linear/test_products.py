"""Properties of all products with packed weights, for every weight type and implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.cpu import availability
from kernels.linear.fp32 import Linear, Product
from kernels.linear.int4 import Int4Linear
from kernels.linear.int8 import Int8Linear
from tests.kernels.layouts import random_int4, random_int8, require_byte_products
from tests.seeds import shift

Make = Callable[[int, int, bool], Product]
"""Function of the numbers of outputs and inputs, and True for a bias."""
SHAPES = [(96, 48), (48, 96), (400, 48), (33, 7), (31, 17), (1, 1), (500, 1537), (1536, 512), (512, 1536)]


def float32(out: int, into: int, bias: bool) -> Product:
    return Linear(torch.randn(out, into), torch.randn(out) if bias else None)


def int8(out: int, into: int, bias: bool) -> Product:
    return Int8Linear(*random_int8(out, into), torch.randn(out) if bias else None)


def int4(out: int, into: int, bias: bool) -> Product:
    if into % 32:
        pytest.skip("groups are of 32 columns here")
    codes, scales, zeros = random_int4(out, into, 32)
    return Int4Linear(codes, scales, zeros, torch.randn(out) if bias else None, torch.randperm(into))


_KINDS = {
    "float32 panels": float32,
    "int8 panels": int8,
    "int4 panels": int4,
    "int4 operator": int4,
}


@pytest.fixture(params=_KINDS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    kind = request.param
    if not kind.endswith("panels"):
        monkeypatch.setattr(availability, "HAS_BYTE_PRODUCTS", False)
    elif kind != "float32 panels":
        require_byte_products()
    return _KINDS[kind]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_count_weights_and_bias(make: Make, bias: bool) -> None:
    assert make(50, 128, bias).parameters == 50 * 128 + (50 if bias else 0)


@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_a_row_of_the_result_does_not_depend_on_the_other_rows(make: Make, out: int, into: int) -> None:
    """Results are bit-identical, wherever the row is in a batch of any size."""
    torch.manual_seed(shift(into))
    linear = make(out, into, True)
    x, residual = torch.randn(200, into) * torch.logspace(-2, 2, 200)[:, None], torch.randn(200, out)
    whole, added = linear(x), linear.add(x, residual)
    for rows in (*range(1, 41), 64, 111, 112, 113, 129):
        for start in (0, 71 - rows % 7):
            part = slice(start, start + rows)
            assert torch.equal(linear(x[part]), whole[part])
            assert torch.equal(linear.add(x[part], residual[part]), added[part])


@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_the_number_of_threads(make: Make, out: int, into: int) -> None:
    torch.manual_seed(shift(into))
    linear, x = make(out, into, True), torch.randn(130, into)
    torch.set_num_threads(1)
    alone = [linear(x[:rows]) for rows in (1, 2, 17, 130)]
    for count in (2, 3):
        torch.set_num_threads(count)
        for result in alone:
            assert torch.equal(linear(x[: len(result)]), result)


def test_non_finite_numbers_affect_only_their_row(make: Make) -> None:
    torch.manual_seed(shift(0))
    linear, x = make(70, 64, True), torch.randn(20, 64)
    clean = linear(x)
    x[7, 63], x[11, 0], x[12, 63] = torch.inf, torch.nan, -torch.nan
    spoilt = linear(x)
    others = [row for row in range(20) if row not in (7, 11, 12)]
    assert torch.equal(spoilt[others], clean[others])
    assert not spoilt[[7, 11, 12]].isfinite().any()


def test_x_and_the_residual_may_be_strided(make: Make) -> None:
    torch.manual_seed(shift(0))
    linear, wide, long = make(70, 64, True), torch.randn(20, 76), torch.randn(76, 20)
    residual = torch.randn(20, 100)[:, 30:]
    for x in (wide[:, 7:71], wide[::2, :64], wide[5:6, 12:], long[12:].T, wide[:1].expand(20, 76)[:, :64]):
        copy, beside = x.contiguous(), residual[: len(x)]
        assert torch.equal(linear(x), linear(copy))
        assert torch.equal(linear.add(x, beside), linear.add(copy, beside.contiguous()))


def test_a_row_of_zeros_gives_zeros(make: Make) -> None:
    x = torch.zeros(3, 128)
    x[1] = 1
    assert not make(50, 128, False)(x)[[0, 2]].any()


def test_no_rows_give_no_rows(make: Make) -> None:
    linear = make(70, 64, True)
    assert linear(torch.randn(0, 64)).shape == (0, 70)


@pytest.mark.parametrize("x", [torch.zeros(3, 63), torch.zeros(3, 64, dtype=torch.bfloat16)])
def test_x_of_a_wrong_shape_or_type_is_refused(make: Make, x: torch.Tensor) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        make(70, 64, True)(x)


def test_a_residual_of_a_wrong_shape_or_type_is_refused(make: Make) -> None:
    linear = make(70, 64, True)
    if not linear.is_kernel:
        pytest.skip("only the kernels check")
    for residual in (torch.zeros(3, 69), torch.zeros(3, 70, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="residual"):
            linear.add(torch.zeros(3, 64), residual)
