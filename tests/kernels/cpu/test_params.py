"""What a step's tokens are drawn with is gathered from their branches."""

from __future__ import annotations

import pytest
import torch

laws = pytest.importorskip("kernels.cpu.sampling.params")


def test_a_token_has_its_branchs_law_and_a_place_of_its_own() -> None:
    chance = torch.Generator().manual_seed(0)
    floats = torch.rand(5, 3, dtype=torch.float64, generator=chance)
    integers = torch.randint(-(1 << 62), 1 << 62, (5, 3), generator=chance)
    rows, positions = torch.tensor([3, 3, 0, 4]), torch.tensor([17, 18, 0, 17])
    settings, places = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.int64)
    laws.gather_params(floats, integers, rows, positions, settings, places)
    assert torch.equal(settings, floats[rows].T)
    assert torch.equal(places[:3], integers[rows].T)
    assert torch.equal(places[3], positions + 1)
