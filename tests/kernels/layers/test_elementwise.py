"""Copies, sums and products of tensors of any strides equal those of torch, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.layers import elementwise
from tests.seeds import shift


def draw_views(seed: int) -> list[Tensor]:
    """Return tensors of one to four axes, most of them not contiguous."""
    torch.manual_seed(shift(seed))
    rows, wide = torch.randn(7, 24), torch.randn(5, 4, 12)
    return [
        rows[0],
        rows,
        rows[:, 3:20],
        rows[:, ::2],
        wide[:, 1:3],
        wide.transpose(0, 1),
        wide.view(5, 4, 6, 2).transpose(-1, -2),
        torch.randn(300, 70)[:, 1:],
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_results_equal_those_of_torch(seed: int, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        for x, y in zip(draw_views(seed), draw_views(seed + 10), strict=True):
            assert torch.equal(elementwise.add(x, y), x + y)
            assert torch.equal(elementwise.multiply(x, y), x * y)
            assert torch.equal(elementwise.contiguous(x), x)
            assert elementwise.contiguous(x).is_contiguous()
            factors, product = y[:1].clone(), x * y[:1]
            elementwise.write(y, x)
            assert torch.equal(y, x)
            elementwise.scale(y, factors)
            assert torch.equal(y, product)
    finally:
        torch.set_num_threads(1)


def test_parts_of_any_strides_are_put_one_behind_the_other() -> None:
    torch.manual_seed(shift(3))
    x, y = torch.randn(6, 5, 8), torch.randn(6, 3, 16)[:, :, ::2]
    assert torch.equal(elementwise.concatenate((x[:, 1:3], y, x)), torch.cat((x[:, 1:3], y, x), dim=1))
    doubles = elementwise.concatenate((x.double(), y.double()))
    assert torch.equal(doubles, torch.cat((x, y), dim=1).double())
