"""The torch references against float64 formulas written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.activation import gelu_tanh_mul, silu_mul
from kernels.norm import rms_norm
from kernels.rotary import frequencies, rotary, rotary_tables

PAGE = 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_equals_the_float64_formula() -> None:
    x, weight = random(5, 3, 32), random(3, 32, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-6, rtol=1e-5)


def test_silu_mul_equals_the_float64_formula() -> None:
    x = random(7, 20)
    gate, up = x[:, :10].double(), x[:, 10:].double()
    torch.testing.assert_close(silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=1e-5)


def test_rotary_turns_each_pair_by_its_position_and_frequency() -> None:
    dim, theta = 8, 5000.0
    cos, sin = rotary_tables(frequencies(dim, theta), 50)
    x, positions = random(4, 3, dim), [0, 1, 17, 49]
    turned = rotary(x, cos[positions], sin[positions])
    for token, position in enumerate(positions):
        for pair in range(dim // 2):
            angle = position * theta ** (-2 * pair / dim)
            rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            expected = x[token][:, [pair, pair + dim // 2]] @ rotation.T
            torch.testing.assert_close(turned[token][:, [pair, pair + dim // 2]], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", [silu_mul, gelu_tanh_mul])
@pytest.mark.parametrize("width", [48, 96, 1030, 1536])
def test_an_activated_row_does_not_depend_on_the_other_rows(activation: Callable[[Tensor], Tensor], width: int) -> None:
    """Bit for bit, on as many threads as there are."""
    x = random(300, 2 * width)
    whole = activation(x)
    for rows in (1, 2, 3, 17, 129, 211, 299):
        assert torch.equal(activation(x[:rows]), whole[:rows])
        assert torch.equal(activation(x[300 - rows :]), whole[300 - rows :])
