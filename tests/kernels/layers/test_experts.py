"""Routing to experts and their products by kernels, beside the formulas in float64 and products one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.models.routing import Router, RoutingConfig
from kernels.cpu.layers.experts import add_outputs, choose_experts, sort_by_expert
from kernels.cpu.linear.fp32 import PackedFloat32
from kernels.cpu.linear.packed_weights import ExpertWeights, can_compute_together
from kernels.linear.fp32 import Linear
from tests.closeness import EPS, assert_rounded
from tests.seeds import shift

EXPERTS = 8
CONFIGS = [
    RoutingConfig(2, is_normalized=True),
    RoutingConfig(3, is_normalized=False, scale=2.5),
    RoutingConfig(2, is_normalized=True, score="sigmoid", num_groups=4, groups_per_token=2, scale=1.5),
    RoutingConfig(1, is_normalized=False, score="sigmoid"),
]


class Same(Linear):
    """A product that returns its input."""

    def __init__(self) -> None:
        super().__init__(torch.eye(EXPERTS))

    def __call__(self, x: object) -> Tensor:
        assert isinstance(x, Tensor)
        return x


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("has_correction", [False, True])
def test_the_kernel_chooses_the_experts_of_the_formulas(seed: int, config: RoutingConfig, has_correction: bool) -> None:
    torch.manual_seed(shift(seed))
    logits, correction = 3 * torch.randn(40, EXPERTS), torch.randn(EXPERTS) if has_correction else None
    config = replace(config, num_groups=config.num_groups if has_correction else 1)
    ours = Router(config, Same(), correction)
    weights, chosen = ours(logits)
    exact = Router(config, Same(), None if correction is None else correction.double())
    right_weights, right = exact(logits.double())
    assert torch.equal(chosen, right)
    # Exponentials, their sum and two quotients: twice as many roundings as there are experts, at most.
    assert_rounded(weights, right_weights, 2 * EXPERTS * EPS * config.scale)
    single = [ours(logits[row : row + 1]) for row in range(40)]
    assert torch.equal(weights, torch.cat([one for one, _ in single]))


def test_equal_scores_go_to_the_first_experts() -> None:
    _, chosen = choose_experts(
        torch.zeros(3, EXPERTS),
        None,
        per_token=2,
        is_softmax=True,
        is_normalized=True,
        num_groups=1,
        groups_per_token=1,
        scale=1.0,
        least_sum=0.0,
    )
    assert chosen.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 150])
def test_the_products_of_all_experts_are_those_of_each(tokens: int, threads: int) -> None:
    torch.manual_seed(shift(tokens))
    matrices, bias = torch.randn(EXPERTS, 70, 33), torch.randn(EXPERTS, 70)
    packed = [PackedFloat32(matrix) for matrix in matrices]
    assert can_compute_together(packed)
    assert not can_compute_together([packed[0], PackedFloat32(torch.randn(70, 34))])
    x, chosen = torch.randn(tokens, 33), torch.rand(tokens, EXPERTS).argsort(1)[:, :2] // 2
    weights, residual = torch.rand(tokens, 2), torch.randn(tokens, 70)
    torch.set_num_threads(threads)
    try:
        route = sort_by_expert(chosen, EXPERTS)
        outputs = ExpertWeights(packed, list(bias)).product(x[route.tokens], route.ends)
        total = add_outputs(outputs, weights, route.rows, residual)
    finally:
        torch.set_num_threads(1)
    assert route.ends.tolist() == [int((chosen < expert).sum()) for expert in range(EXPERTS + 1)]
    for token in range(tokens):
        for index, expert in enumerate(chosen[token].tolist()):
            row = outputs[route.rows.view(tokens, 2)[token, index]]
            assert torch.equal(row, packed[expert].product(x[token : token + 1], bias[expert], None)[0])
    rows = outputs.double()[route.rows.view(tokens, 2)]
    right = (weights.double()[:, :, None] * rows).sum(1) + residual.double()
    assert_rounded(total, right, 4 * EPS * ((weights.double()[:, :, None] * rows.abs()).sum(1) + residual.abs()))
