"""Gated activations compared with float64 formulas: the kernels, and torch's operators where gradients are recorded."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.layers.activation import clamped_silu_mul, gelu_tanh_mul, relu_squared, silu_mul
from tests.closeness import EPS, assert_rounded
from tests.seeds import shift

Activation = Callable[[Tensor], Tensor]


def random(*shape: int) -> Tensor:
    return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(shift(0)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def check(function: Activation, formula: Activation, x: Tensor) -> None:
    gate, up = x.double().chunk(2, dim=1)
    exact = formula(gate) * up
    # An exponential (2 EPS) whose argument, up to 16, was rounded twice, and four operations; for gelu's 1 + tanh also
    # the cancellation of two numbers near 1.
    assert_rounded(
        function(x).detach(), exact.detach(), (24 * EPS * exact.abs() + 4 * EPS * (gate * up).abs()).detach()
    )


both = pytest.mark.parametrize(("function", "formula"), [(silu_mul, silu), (gelu_tanh_mul, gelu)])


@both
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 10), (3, 131), (40, 1536)])
def test_results_equal_the_float64_formula(function: Activation, formula: Activation, rows: int, width: int) -> None:
    check(function, formula, random(rows, 2 * width))


@pytest.mark.parametrize("function", [silu_mul, gelu_tanh_mul])
def test_large_infinite_and_nan_inputs(function: Activation) -> None:
    gate = torch.tensor([[200.0, 1e30, torch.inf, torch.nan, -200.0, -1e30, 0.0, 1.0]])
    up = torch.tensor([[2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, torch.inf]])
    expected = torch.tensor([[400.0, 2e30, torch.inf, torch.nan, 0.0, 0.0, 0.0, torch.inf]])
    found = function(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(found, expected, atol=0, rtol=4 * EPS, equal_nan=True)


@both
def test_rows_may_be_strided(function: Activation, formula: Activation) -> None:
    wide = random(5, 100)
    for part in (wide[:, 20:80], wide[::2, :60], wide[:, ::2]):
        check(function, formula, part)
        assert torch.equal(function(part), function(part.clone(memory_format=torch.contiguous_format)))


@both
def test_gradients_are_those_of_the_float64_formula(function: Activation, formula: Activation) -> None:
    x = random(3, 20).requires_grad_()
    check(function, formula, x)
    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    (formula(gate) * up).sum().backward()
    function(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [silu_mul, gelu_tanh_mul])
@pytest.mark.parametrize("width", [48, 96, 1030, 1536])
def test_a_row_does_not_depend_on_the_other_rows(function: Activation, width: int) -> None:
    """Results are bit-identical with any number of threads."""
    x = random(300, 2 * width)
    whole = function(x)
    for rows in (1, 2, 3, 17, 129, 211, 299):
        assert torch.equal(function(x[:rows]), whole[:rows])
        assert torch.equal(function(x[300 - rows :]), whole[300 - rows :])


@pytest.mark.parametrize("seed", range(20))
def test_a_clamped_activation_equals_the_float64_formula(seed: int) -> None:
    x = 4 * torch.randn(9, 2 * 37, generator=torch.Generator().manual_seed(shift(seed)))
    gate, up = x.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    exact = gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    # As above, with an argument up to 28 that was rounded once more; and up + 1, which may cancel, is rounded.
    bound = 40 * EPS * exact.abs() + 4 * EPS * (gate * (1 + up.abs())).abs()
    for kernel in (True, False):
        found = clamped_silu_mul(x.clone().requires_grad_(not kernel), alpha=1.702, limit=7.0)
        assert_rounded(found.detach(), exact, bound)


def test_a_clamp_leaves_nan_as_it_is_and_takes_infinite_numbers() -> None:
    gate = torch.tensor([[torch.nan, 1.0, torch.inf, 1.0, 1.0]])
    up = torch.tensor([[1.0, torch.nan, 1.0, torch.inf, -torch.inf]])
    found = clamped_silu_mul(torch.cat((gate, up), dim=1), alpha=1.0, limit=2.0)
    one, two = 1 / (1 + math.exp(-1)), 2 / (1 + math.exp(-2))
    expected = torch.tensor([[torch.nan, torch.nan, 2 * two, 3 * one, -one]])
    torch.testing.assert_close(found, expected, atol=0, rtol=4 * EPS, equal_nan=True)


def test_rows_of_a_clamped_activation_depend_on_no_other_row() -> None:
    x = random(40, 2 * 131)
    whole = clamped_silu_mul(x, alpha=1.702, limit=7.0)
    assert all(
        clamped_silu_mul(x[row : row + 1], alpha=1.702, limit=7.0).equal(whole[row : row + 1]) for row in range(40)
    )


def test_a_squared_relu_is_rounded_once() -> None:
    x = random(40, 131)
    whole = relu_squared(x)
    assert_rounded(whole, x.double().clamp(min=0).square(), EPS / 2 * x.double().square())
    assert all(relu_squared(x[row : row + 1]).equal(whole[row : row + 1]) for row in range(40))
    assert relu_squared(torch.tensor([[torch.nan]])).isnan().all()
