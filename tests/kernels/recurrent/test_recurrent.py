"""The gated delta rule, Mamba-2, short convolutions: compiled kernels, their references and transformers' formulas."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from kernels.layers.gate import sigmoid_mul
from kernels.recurrent.convolution import causal_convolution
from kernels.recurrent.gated_delta import delta_gates, gated_delta
from kernels.recurrent.mamba2 import HeadConstants, mamba2_scan
from tests.closeness import EPS, assert_rounded
from tests.seeds import shift

SEGMENTS = torch.tensor([[0, 5, -1, 0, 1], [5, 6, 1, 1, 1], [6, 9, 2, 3, 2], [9, 20, 3, 2, 0]])
"""A new sequence, one that is advanced in place, and one that is cut where a snapshot is taken, over its own slot."""
TOKENS, SLOTS = 20, 4


class Delta(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    states: Tensor

    def double(self) -> Delta:
        return Delta(*(tensor.double() for tensor in self))


def draw_delta(seed: int, key_heads: int = 2, heads: int = 4, key_dim: int = 16, value_dim: int = 24) -> Delta:
    torch.manual_seed(shift(seed))
    q, k = torch.randn(2, TOKENS, key_heads, key_dim)
    v, rest = torch.randn(TOKENS, heads, value_dim), torch.randn(2, TOKENS, heads)
    return Delta(q, k, v, -F.softplus(rest[0]), rest[1].sigmoid(), torch.randn(SLOTS, heads, key_dim, value_dim))


def run_transformers(given: Delta, start: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs and the final state of one sequence by transformers' code, in float64."""
    repeats = given.v.shape[1] // given.q.shape[1]
    q, k = (x[start:end].repeat_interleave(repeats, dim=1)[None] for x in (given.q, given.k))
    v, decay, beta = (x[start:end][None] for x in (given.v, given.decay, given.beta))
    out, final = torch_recurrent_gated_delta_rule(
        q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out[0], final


def test_the_reference_of_the_delta_rule_is_that_of_transformers() -> None:
    from engine.core.reference import float64

    given = draw_delta(1).double()
    states = given.states.clone()
    with float64():
        first, first_state = run_transformers(given, 0, 5, None)
        forked, snapshot = run_transformers(given, 6, 9, given.states[2:3])
        last, last_state = run_transformers(given, 9, 20, snapshot)
    out = gated_delta(*given[:5], states, SEGMENTS)
    torch.testing.assert_close(out[:5], first)
    torch.testing.assert_close(out[6:], torch.cat((forked, last)))
    torch.testing.assert_close(states[[0, 3, 2]], torch.cat((first_state, snapshot, last_state)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(2, 4, 16, 24), (1, 3, 8, 40), (4, 4, 64, 64)])
def test_the_compiled_delta_rule_equals_its_reference(seed: int, sizes: tuple[int, int, int, int]) -> None:
    given = draw_delta(seed, *sizes)
    exact, states = given.double(), given.states.clone()
    exact_states = exact.states.clone()
    ours, right = gated_delta(*given[:5], states, SEGMENTS), gated_delta(*exact[:5], exact_states, SEGMENTS)
    # A token decays, reads and writes a state of ``key_dim`` products, with a rounding each, and 14 follow one another.
    bound = EPS * 14 * sizes[2] * float(exact_states.abs().max())
    assert_rounded(ours, right, bound)
    assert_rounded(states, exact_states, bound)


def test_a_state_does_not_depend_on_the_cuts_of_its_sequence() -> None:
    """In one segment, token by token, and beside another sequence: the same bits."""
    given = draw_delta(4)
    whole, single = given.states.clone(), given.states.clone()
    out = gated_delta(*given[:5], whole, torch.tensor([[0, TOKENS, -1, 0, 1]]))
    for token in range(TOKENS):
        part = [x[token : token + 1] for x in given[:5]]
        source = token % 2 if token else -1
        step = gated_delta(*part, single, torch.tensor([[0, 1, source, (token + 1) % 2, 1]]))
        assert torch.equal(step, out[token : token + 1])
    assert torch.equal(single[TOKENS % 2], whole[0])


def test_the_gates_of_the_delta_rule_equal_their_formulas() -> None:
    torch.manual_seed(shift(6))
    a, b = 30 * torch.randn(2, 50, 3)
    rates, bias = -torch.rand(3), torch.randn(3)
    decay, beta = delta_gates(a, b, rates, bias)
    right = delta_gates(*(x.double() for x in (a, b, rates, bias)))
    assert_rounded(decay, right[0], 8 * EPS * right[0].abs() + 8 * EPS)
    assert_rounded(beta, right[1], 8 * EPS)
    single = [delta_gates(a[row : row + 1], b[row : row + 1], rates, bias) for row in range(len(a))]
    assert torch.equal(decay, torch.cat([one for one, _ in single]))
    assert torch.equal(beta, torch.cat([one for _, one in single]))


class Mamba(NamedTuple):
    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    heads: HeadConstants
    states: Tensor

    def double(self) -> Mamba:
        constants = self.heads._replace(
            rates=self.heads.rates.double(), bias=self.heads.bias.double(), skips=self.heads.skips.double()
        )
        return Mamba(*(part.double() for part in self[:4]), constants, self.states.double())


def draw_mamba(seed: int, groups: int = 2, heads: int = 4, state_size: int = 16, head_dim: int = 24) -> Mamba:
    """Return inputs of which some have a step size at one end of its range."""
    torch.manual_seed(shift(seed))
    b, c = torch.randn(2, TOKENS, groups, state_size)
    x, dt = torch.randn(TOKENS, heads, head_dim), 3 * torch.randn(TOKENS, heads)
    constants = HeadConstants(-torch.rand(heads), torch.randn(heads), torch.randn(heads), 0.05, 4.0)
    return Mamba(x, b, c, dt, constants, torch.randn(SLOTS, heads, state_size, head_dim))


def scan_by_transformers(given: Mamba, start: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs and the final state of one sequence by transformers' code, in chunks of 4 tokens."""
    rates, bias, skips, least, most = given.heads
    x, b, c, dt = (part[None, start:end] for part in given[:4])
    options = {"D": skips, "dt_bias": bias, "dt_softplus": True, "dt_limit": (least, most)}
    initial = None if state is None else state.transpose(2, 3)
    out, final = mamba2_chunk_scan(x, dt, rates, b, c, 4, **options, initial_states=initial, return_final_states=True)
    return out[0], final.transpose(2, 3)


def test_the_reference_of_mamba_2_is_that_of_transformers() -> None:
    from engine.core.reference import float64

    given = draw_mamba(11).double()
    states = given.states.clone()
    with float64():
        first, first_state = scan_by_transformers(given, 0, 5, None)
        forked, snapshot = scan_by_transformers(given, 6, 9, given.states[2:3])
        last, last_state = scan_by_transformers(given, 9, 20, snapshot)
    out = mamba2_scan(*given[:5], states, SEGMENTS)
    torch.testing.assert_close(out[:5], first)
    torch.testing.assert_close(out[6:], torch.cat((forked, last)))
    torch.testing.assert_close(states[[0, 3, 2]], torch.cat((first_state, snapshot, last_state)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(2, 4, 16, 24), (1, 3, 8, 40), (4, 4, 64, 64), (1, 2, 128, 8)])
def test_the_compiled_mamba_2_equals_its_reference(seed: int, sizes: tuple[int, int, int, int]) -> None:
    given = draw_mamba(seed, *sizes)
    exact, states = given.double(), given.states.clone()
    exact_states = exact.states.clone()
    ours, right = mamba2_scan(*given[:5], states, SEGMENTS), mamba2_scan(*exact[:5], exact_states, SEGMENTS)
    # A token decays, adds to and reads a state, with a few roundings each, and 14 tokens follow one another. A result
    # is a sum of ``state_size`` products with ``c``, whose errors add up like the square root of their number.
    size = float(exact_states.abs().max()) * 4 * sizes[2] ** 0.5
    assert_rounded(ours, right, EPS * 14 * 4 * size)
    assert_rounded(states, exact_states, EPS * 14 * 4 * float(exact_states.abs().max()))


def test_a_state_of_mamba_2_does_not_depend_on_the_cuts_of_its_sequence() -> None:
    """In one segment, token by token, and in pieces: the same bits."""
    given = draw_mamba(12)
    whole, single, pieces = (given.states.clone() for _ in range(3))
    out = mamba2_scan(*given[:5], whole, torch.tensor([[0, TOKENS, -1, 0, 1]]))
    for cuts, states in ((range(TOKENS + 1), single), ((0, 1, 3, 4, 11, TOKENS), pieces)):
        for index, (start, end) in enumerate(pairwise(cuts)):
            part = [x[start:end] for x in given[:4]]
            segment = torch.tensor([[0, end - start, index % 2 if index else -1, (index + 1) % 2, 1]])
            assert torch.equal(mamba2_scan(*part, given.heads, states, segment), out[start:end])
        assert torch.equal(states[(len(cuts) - 1) % 2], whole[0])


def test_a_step_size_that_is_no_number_stays_none() -> None:
    given = draw_mamba(13)
    given.dt[3, 1] = torch.nan
    out = mamba2_scan(*given[:5], given.states, torch.tensor([[0, TOKENS, -1, 0, 1]]))
    assert out[3:, 1].isnan().all()
    assert not out[:3].isnan().any()
    assert not out[:, 0].isnan().any()


@pytest.mark.parametrize("columns", [1, 37])
def test_a_sigmoid_gate_scales_each_row_alone(columns: int) -> None:
    torch.manual_seed(shift(8))
    gate, x = 10 * torch.randn(21, columns), torch.randn(21, 37)
    ours = sigmoid_mul(gate, x)
    assert_rounded(ours, torch.sigmoid(gate.double()) * x.double(), 8 * EPS * x.double().abs())
    assert torch.equal(ours, torch.cat([sigmoid_mul(gate[row : row + 1], x[row : row + 1]) for row in range(21)]))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("activate", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_compiled_convolution_equals_its_reference(width: int, activate: bool, has_bias: bool) -> None:
    torch.manual_seed(shift(width))
    x, weight, states = torch.randn(TOKENS, 37), torch.randn(width, 37), torch.randn(SLOTS, width - 1, 37)
    exact_states, bias = states.double(), torch.randn(37) if has_bias else None
    right = causal_convolution(
        *(x.double(), weight.double(), exact_states, SEGMENTS),
        activate=activate,
        bias=None if bias is None else bias.double(),
    )
    ours = causal_convolution(x, weight, states, SEGMENTS, activate=activate, bias=bias)
    assert_rounded(ours, right, EPS * (width + 5) * float(right.abs().max() + weight.abs().sum(0).max() * 4))
    assert torch.equal(states.double(), exact_states)


def test_the_reference_of_the_convolution_is_that_of_torch() -> None:
    torch.manual_seed(shift(9))
    x, weight = torch.randn(TOKENS, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    states = torch.zeros(1, 3, 6, dtype=torch.float64)
    ours = causal_convolution(x, weight, states, torch.tensor([[0, TOKENS, -1, 0, 1]]), activate=False)
    right = F.conv1d(F.pad(x.T[None], (3, 0)), weight.T[:, None], groups=6)[0].T
    torch.testing.assert_close(ours, right)
    assert torch.equal(states[0], x[-3:])


def test_a_convolution_does_not_depend_on_the_cuts_of_its_sequence() -> None:
    torch.manual_seed(shift(10))
    x, weight = torch.randn(TOKENS, 6), torch.randn(4, 6)
    whole, single = torch.zeros(2, 3, 6), torch.zeros(2, 3, 6)
    out = causal_convolution(x, weight, whole, torch.tensor([[0, TOKENS, -1, 0, 1]]), activate=True)
    for start, end in ((0, 1), (1, 3), (3, 4), (4, 11), (11, TOKENS)):
        part = causal_convolution(
            x[start:end], weight, single, torch.tensor([[0, end - start, 0 if start else -1, 0, 1]]), activate=True
        )
        assert torch.equal(part, out[start:end])
    assert torch.equal(single[0], whole[0])
