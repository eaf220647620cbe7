"""The bound on float32 from random roundings admits every float32 computation, and none with 16 bits in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.closeness import EPS
from tests.engine.conftest import Checkpoints
from tests.engine.exact import exact_logits, float32_loss, peer_logits, reference
from tests.engine.models.test_models import random_tokens
from tests.rounding import MARGIN, compute_rounded, float32_bound
from tests.seeds import shift


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma2", "phi3", "gpt2", "qwen2_classify"])
def test_float32_is_within_the_bound_and_a_state_in_16_bits_far_beyond_it(checkpoints: Checkpoints, kind: str) -> None:
    folder, tokens = checkpoints(kind), random_tokens(120, 1)
    bound = float32_loss(folder).logit
    exact = exact_logits(folder, tokens)
    assert (peer_logits(folder, tokens).double() - exact).abs().max() < bound / MARGIN
    embedding = reference(folder).get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, inputs, output: output.bfloat16().float())
    rounded = peer_logits(folder, tokens)
    hook.remove()
    assert (rounded.double() - exact).abs().max() > 10 * bound


def test_every_kind_of_operation_is_rounded_and_copies_are_not() -> None:
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(shift(1)), dtype=torch.float64)
    operations = {
        "product": lambda: x @ x,
        "batch of products": lambda: x[None] @ x[None],
        "biased product": lambda: torch.addmm(x[0], x, x),
        "sum": lambda: x.sum(1),
        "mean": lambda: x.mean(0),
        "softmax": lambda: x.softmax(1),
        "logarithm": lambda: x.log_softmax(1),
        "element": lambda: x * x,
        "in place": lambda: x.clone().mul_(x),
        "function": lambda: torch.nn.functional.silu(x),
    }
    for name, compute in operations.items():
        for rounded in compute_rounded(compute):
            relative = ((rounded - compute()) / compute()).abs()
            assert EPS / 1000 < float(relative.max()) < 20 * EPS, name

    def copy() -> Tensor:
        return torch.cat((x.T, x[:, :3].contiguous().T)).clone()

    assert all(rounded.equal(copy()) for rounded in compute_rounded(copy))


def test_infinities_of_masks_stay_as_they_are() -> None:
    mask = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    for rounded in compute_rounded(lambda: (mask + 1.5).softmax(0)):
        assert rounded[1] == 0
        assert rounded[0] == pytest.approx(1)
    assert float32_bound(lambda: mask[:1] + 1.5) < MARGIN * EPS
