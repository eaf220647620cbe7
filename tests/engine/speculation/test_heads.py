"""What heads have in common computes what the target's own parts do."""

from __future__ import annotations

import pytest
import torch

from engine.speculation.heads import product, readout
from kernels.linear import Linear
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "gpt2", "cohere"])
def test_a_cheap_read_out_is_the_models(checkpoints: Checkpoints, kind: str) -> None:
    """Of models with and without a soft cap, and of some that read what was normalised before."""
    model = Harness(checkpoints(kind)).core.model.decoder
    states = 7 * torch.randn(5, model.config.hidden, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        read = readout(model)
        assert (read == model.read) == (kind in ("gemma2", "gpt2", "cohere"))
        torch.testing.assert_close(read(states), model.read(states), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("size", [(40, 24), (600, 500)])
def test_products_of_small_and_large_matrices_are_the_same(rows: int, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(*size, generator=generator), torch.randn(size[0], generator=generator)
    x = torch.randn(rows, size[1], generator=generator)
    for cheap, right in ((product(weight, bias), Linear(weight, bias)), (product(weight), Linear(weight))):
        torch.testing.assert_close(cheap(x), right(x), rtol=1e-4, atol=1e-4)
