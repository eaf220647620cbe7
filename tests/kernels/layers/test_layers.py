"""RMSNorm and RoPE compared with float64 formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.common.rotary import frequencies, rotary, rotary_tables
from kernels.layers.norm import rms_norm
from tests.closeness import EPS, assert_rounded
from tests.seeds import shift

PAGE = 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shift(seed)))


def test_rms_norm_equals_the_float64_formula() -> None:
    x, weight = random(5, 3, 32), random(3, 32, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    # Half the relative error of a sum of 32 squares, a root, a division and two products.
    bound = (32 / 2 + 4) * EPS / 2 * expected.abs()
    assert_rounded(rms_norm(x, weight, 1e-5), expected, bound)
    assert_rounded(rms_norm(x.requires_grad_(), weight, 1e-5).detach(), expected, bound)


def test_rotary_rotates_each_pair_by_position_times_frequency() -> None:
    dim, theta = 8, 5000.0
    cos, sin = rotary_tables(frequencies(dim, theta), 50)
    x, positions = random(4, 3, dim), [0, 1, 17, 49]
    turned = rotary(x, cos[positions], sin[positions])
    for token, position in enumerate(positions):
        for pair in range(dim // 2):
            angle = position * theta ** (-2 * pair / dim)
            rotation = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            right = torch.tensor(rotation, dtype=torch.float64)
            expected = x[token][:, [pair, pair + dim // 2]].double() @ right.T
            # Numbers up to the pair's length: an angle's cosine and sine, two products and a sum.
            found, size = turned[token][:, [pair, pair + dim // 2]], expected.norm(dim=1, keepdim=True)
            assert_rounded(found, expected, 4 * EPS * size)
