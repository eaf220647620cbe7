"""Sampling parameters and noise keys are gathered from the branches of a step's tokens."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import shift

params = pytest.importorskip("kernels.cpu.sampling.params")


def test_tokens_get_the_parameters_of_their_branches() -> None:
    chance = torch.Generator().manual_seed(shift(0))
    floats = torch.rand(5, 3, dtype=torch.float64, generator=chance)
    integers = torch.randint(-(1 << 62), 1 << 62, (5, 3), generator=chance)
    rows, positions = torch.tensor([3, 3, 0, 4]), torch.tensor([17, 18, 0, 17])
    float_params, int_params = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.int64)
    params.gather_params(floats, integers, rows, positions, float_params, int_params)
    assert torch.equal(float_params, floats[rows].T)
    assert torch.equal(int_params[:3], integers[rows].T)
    assert torch.equal(int_params[3], positions + 1)
