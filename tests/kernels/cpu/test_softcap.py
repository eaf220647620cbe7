"""The kernels' soft cap of attention scores compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.runtime.kernel import as_float, kernel, read_arguments
from kernels.cpu.simd.softmax import cap
from kernels.cpu.simd.vector import load, store
from tests.closeness import EPS


@kernel
def _each(address: Any) -> None:
    a, _, _ = read_arguments(address)
    for i in range(0, a[2], 16):
        store(a[1] + 4 * i, cap(load(a[0] + 4 * i), as_float(a[3])))


def capped(x: Tensor, softcap: float) -> Tensor:
    out = torch.empty_like(x)
    _each(x, out, len(x), softcap, threads=1)
    return out


@pytest.mark.parametrize("softcap", [3.0, 50.0])
def test_results_have_float32_precision_however_small_they_are_beside_the_cap(softcap: float) -> None:
    sizes = torch.logspace(-6, 3, 1 << 16)
    x = torch.cat((sizes, -sizes))
    expected = torch.tanh(x.double() / softcap) * softcap
    # Some roundings in the fraction, and four doublings with three each, which later ones contract.
    assert ((capped(x, softcap) - expected) / expected).abs().max() < 6 * EPS


def test_zero_and_infinity() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e30, -1e30] + [0.0] * 10)
    expected = torch.tensor([0.0, 0.0, 50.0, -50.0, 50.0, -50.0] + [0.0] * 10)
    torch.testing.assert_close(capped(x, 50.0), expected, rtol=2 * EPS, atol=0)
