"""The patched interpreter computes what torch computes, and the guard detects accesses outside tensors."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.closeness import assert_rounded, product_bound
from tests.seeds import shift

NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def _cast(source, target, n: tl.constexpr):
    lane = tl.arange(0, n)
    tl.store(target + lane, tl.load(source + lane).to(target.dtype.element_ty))


@triton.jit
def _dot(a, b, c, n: tl.constexpr):
    row, column = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    x, y = tl.load(a + row * n + column), tl.load(b + row * n + column)
    tl.store(c + row * n + column, tl.dot(x, y, out_dtype=tl.float32, input_precision="ieee"))


@triton.jit
def _arithmetic(a, b, out, n: tl.constexpr):
    lane = tl.arange(0, n)
    x, y = tl.load(a + lane), tl.load(b + lane)
    tl.store(out + lane, x * y + x - y)
    tl.store(out + n + lane, tl.where(x > y, x, -y))
    tl.store(out + 2 * n + lane, tl.maximum(x, y))
    tl.store(out + 3 * n + lane, tl.max(x, axis=0))
    tl.store(out + 4 * n + lane, tl.sum(x, axis=0))


@triton.jit
def _sort(source, target, n: tl.constexpr):
    lane = tl.arange(0, n)
    tl.store(target + lane, tl.sort(tl.load(source + lane)))


@triton.jit
def _copy(source, target, count, step, n: tl.constexpr):
    lane = tl.arange(0, n)
    tl.store(target + lane // step, tl.load(source + lane, mask=lane < count, other=0.0), mask=lane < count)


def every_float(dtype: torch.dtype) -> torch.Tensor:
    """Return every finite number of the type, in float32."""
    size = torch.finfo(dtype).bits
    bits = torch.arange(2**size).to(torch.int16 if size == 16 else torch.uint8)
    values = bits.view(dtype).float()
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_casts_round_to_nearest_even_and_float8_saturates(dtype: torch.dtype) -> None:
    """Covers all numbers of the type, the midpoints, the floats next to midpoints, and numbers out of range."""
    exact = every_float(dtype).unique()
    middle = (exact[1:].double() + exact[:-1].double()).div(2).float()
    near = [torch.nextafter(middle, torch.full_like(middle, to)) for to in (-torch.inf, torch.inf)]
    huge = torch.tensor([1e30, -1e30, torch.inf]) if dtype != torch.bfloat16 else torch.tensor([torch.inf])
    values = torch.cat((exact, middle, *near, huge))
    size = triton.next_power_of_2(len(values))
    values = torch.nn.functional.pad(values, (0, size - len(values)))
    ours = torch.empty(size, dtype=dtype)
    _cast[(1,)](values, ours, size)
    bounded = values if dtype == torch.bfloat16 else values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    torch.testing.assert_close(ours.float(), bounded.to(dtype).float(), atol=0, rtol=0)
    back = torch.empty(size)
    _cast[(1,)](ours, back, size)
    torch.testing.assert_close(back, ours.float(), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float16], ids=str)
def test_products_of_matrices_are_computed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(shift(0))
    a, b = torch.randn(32, 32).to(dtype), torch.randn(32, 32).to(dtype)
    ours = torch.empty(32, 32)
    _dot[(1,)](a, b, ours, 32)
    assert_rounded(ours, a.double() @ b.double(), product_bound(a, b.T))


def test_arithmetic_in_bfloat16_equals_torch() -> None:
    torch.manual_seed(shift(0))
    a, b = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    ours = torch.empty(5, 64, dtype=torch.bfloat16)
    _arithmetic[(1,)](a, b, ours, 64)
    torch.testing.assert_close(ours[0], a * b + a - b, atol=0, rtol=0)
    torch.testing.assert_close(ours[1], torch.where(a > b, a, -b), atol=0, rtol=0)
    torch.testing.assert_close(ours[2], torch.maximum(a, b), atol=0, rtol=0)
    torch.testing.assert_close(ours[3], a.max().expand(64), atol=0, rtol=0)
    torch.testing.assert_close(ours[4], a.float().sum().bfloat16().expand(64))


def test_the_maximum_of_only_nan_gives_no_warning() -> None:
    out = torch.zeros(40)
    _arithmetic[(1,)](torch.full((8,), torch.nan), torch.ones(8), out, 8)
    assert out[24:].isnan().all()


def test_sort_returns_sorted_numbers() -> None:
    torch.manual_seed(shift(0))
    values, ours = torch.randn(64), torch.empty(64)
    _sort[(1,)](values, ours, 64)
    torch.testing.assert_close(ours, values.sort().values, atol=0, rtol=0)


def test_the_guard_detects_a_lane_out_of_bounds_and_two_lanes_at_one_address() -> None:
    source, target = torch.zeros(100)[:50], torch.zeros(50)
    _copy[(1,)](source, target, 50, 1, 64)
    with pytest.raises(Exception, match=r"load in program .* 1 of 51 lanes .* byte 200 of one with 200"):
        _copy[(1,)](source, torch.zeros(60), 51, 1, 64)
    with pytest.raises(Exception, match=r"store in program .* 1 of 50 lanes"):
        _copy[(1,)](source, target[:49], 50, 1, 64)
    with pytest.raises(Exception, match="25 lanes hit the same addresses"):
        _copy[(1,)](source, target, 50, 2, 64)
