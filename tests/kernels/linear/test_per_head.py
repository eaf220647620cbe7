"""Products with a matrix for each head against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.per_head import HeadProducts
from tests.closeness import assert_rounded
from tests.seeds import shift


@pytest.mark.parametrize(
    ("heads", "num_in", "num_out"), [(1, 5, 16), (3, 24, 8), (4, 17, 80), (20, 192, 512), (2, 64, 1)]
)
@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
def test_products_equal_float64_within_rounding(tokens: int, heads: int, num_in: int, num_out: int) -> None:
    torch.manual_seed(shift(tokens))
    x, weight = torch.randn(tokens, heads, num_in + 3)[:, :, 3:], torch.randn(heads, num_in, num_out)
    found = HeadProducts(weight)(x)
    exact = torch.einsum("thi,hio->tho", x.double(), weight.double())
    magnitude = torch.einsum("thi,hio->tho", x.double().abs(), weight.double().abs())
    assert found.shape == (tokens, heads, num_out)
    assert_rounded(found, exact, num_in * 2.0**-24 * magnitude)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_does_not_depend_on_the_other_rows_or_the_number_of_threads(threads: int) -> None:
    torch.manual_seed(shift(0))
    x, products = torch.randn(11, 20, 64), HeadProducts(torch.randn(20, 64, 48))
    expected, before = products(x), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for token in range(11):
            assert torch.equal(products(x[token : token + 1])[0], expected[token])
        assert torch.equal(products(x), expected)
    finally:
        torch.set_num_threads(before)
