"""The kernels' exponential function compared with float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.runtime.kernel import float32_array, kernel, read_arguments
from kernels.cpu.simd.exp import exp32


@kernel
def _each(address: Any) -> None:
    a, _, _ = read_arguments(address)
    x, out = float32_array(a[0], (a[2],)), float32_array(a[1], (a[2],))
    for i in range(a[2]):
        out[i] = exp32(x[i])


def exponential(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _each(x, out, len(x), threads=1)
    return out


def test_normal_results_have_float32_precision() -> None:
    x = torch.linspace(-87.3, 88.7, 1_000_003)
    expected = x.double().exp()
    # The documented error: 4e-9 of the fit, 6e-8 of the rounding of the result and as much of the steps before.
    assert ((exponential(x) - expected) / expected).abs().max() < 1e-7


def test_denormal_results_are_within_their_spacing() -> None:
    x = torch.linspace(-106, -87.3, 100_003)
    assert (exponential(x) - x.double().exp()).abs().max() < 1.01 * 2.0**-149


def test_zero_infinity_and_nan() -> None:
    x = torch.tensor([0.0, -0.0, 88.73, 1e30, torch.inf, -104.1, -1e30, -torch.inf, torch.nan])
    expected = torch.tensor([1.0, 1.0, torch.inf, torch.inf, torch.inf, 0.0, 0.0, 0.0, torch.nan])
    torch.testing.assert_close(exponential(x), expected, atol=0, rtol=0, equal_nan=True)
