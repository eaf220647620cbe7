"""The draft heads' shared output projection and matrix products equal the target's."""

from __future__ import annotations

import pytest
import torch

from engine.speculation.drafters.head_config import product, readout
from kernels.linear.fp32 import Linear
from tests.closeness import EPS, assert_rounded, product_bound
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness
from tests.engine.speculation.heads import Target
from tests.rounding import float32_bound
from tests.seeds import shift


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "gpt2", "cohere"])
def test_cheap_logits_equal_the_models(checkpoints: Checkpoints, kind: str) -> None:
    """Models with and without a soft cap, and models whose output projection follows another norm."""
    model = Harness(checkpoints(kind)).core.model.decoder
    states = 7 * torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(shift(1)))
    with torch.inference_mode():
        read = readout(model)
        assert (read == model.compute_logits) == (kind in ("gemma2", "gpt2", "cohere"))
        # Tolerance of ``readout``'s probe: the norm's epsilon has a larger effect on a vector of length 1.
        torch.testing.assert_close(read(states), model.compute_logits(states), rtol=1e-3, atol=1e-3)
        if kind in ("qwen3", "llama"):
            exact = Target(checkpoints(kind))
            right = torch.from_numpy(exact.read_direction(states.double()))
            bound = float32_bound(lambda: torch.from_numpy(exact.read_direction(states.double())))
            assert_rounded(read(states), right, bound)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("size", [(40, 24), (600, 500)])
def test_products_of_small_and_large_matrices_are_the_same(rows: int, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shift(0))
    weight, bias = torch.randn(*size, generator=generator), torch.randn(size[0], generator=generator)
    x = torch.randn(rows, size[1], generator=generator)
    for cheap, right in ((product(weight, bias), Linear(weight, bias)), (product(weight), Linear(weight))):
        expected = right(x).double()
        # Both have this error bound against float64, and round once more for the bias.
        assert_rounded(cheap(x), expected, 2 * product_bound(x, weight) + 2 * EPS * expected.abs())
