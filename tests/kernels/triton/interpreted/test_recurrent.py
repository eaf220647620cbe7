"""Layers with states, compared with float64: chains, forks, trees of drafts, snapshots, and rows of padding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import InterpreterError

from kernels.layers.activation import silu_gate
from kernels.layers.gate import sigmoid_mul
from kernels.recurrent import convolution as plain_convolution
from kernels.recurrent import gated_delta as plain_delta
from kernels.recurrent import mamba2 as plain_mamba2
from kernels.recurrent.mamba2 import HeadConstants
from kernels.triton.activation import scale_rows
from kernels.triton.recurrent import convolution, gated_delta, mamba2
from tests.closeness import EPS, assert_rounded
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.interpreted.recurrent_steps import Step, random_step
from tests.kernels.triton.planted import planted
from tests.long import mostly_long, mostly_long_grid
from tests.seeds import shift

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TINY, TINY_HALF = torch.finfo(torch.float32).tiny, 2.0**-24
"""The least normal float32, and the least float16: what is smaller is rounded to a multiple."""
SEEDS = mostly_long(range(20), every=20)


def unit(dtype: torch.dtype) -> float:
    """Return the error of a result that is rounded to ``dtype``, of size 1."""
    return torch.finfo(dtype).eps if dtype != torch.float32 else 0.0


class Inputs(NamedTuple):
    """The inputs of a step's tokens, whose rows lie apart as those of a wider projection do, and the states."""

    tokens: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    states: Tensor


def rows_of(wide: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return parts of the rows of a matrix ``[tokens, all]`` in these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return tuple(
        part.view(len(wide), *shape) for part, shape in zip(torch.split(wide, sizes, dim=1), shapes, strict=True)
    )


def draw_delta(step: Step, seed: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    torch.manual_seed(shift(seed))
    key_heads, heads, key_dim, value_dim = sizes
    shapes = (key_heads, key_dim), (key_heads, key_dim), (heads, value_dim)
    wide = torch.randn(step.num_tokens, sum(a * b for a, b in shapes)).to(dtype)
    decay, beta = -F.softplus(torch.randn(step.num_tokens, heads)), torch.rand(step.num_tokens, heads)
    states = torch.randn(step.num_slots, heads, key_dim, value_dim)
    return Inputs((*rows_of(wide, *shapes), decay, beta), (), states)


def draw_mamba(step: Step, seed: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    torch.manual_seed(shift(seed))
    groups, heads, state_size, head_dim = sizes
    shapes = (heads, head_dim), (groups, state_size), (groups, state_size), (heads,)
    wide = torch.randn(step.num_tokens, sum(torch.Size(shape).numel() for shape in shapes))
    wide[:, -heads:] *= 3
    constants = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    states = torch.randn(step.num_slots, heads, state_size, head_dim)
    return Inputs(rows_of(wide.to(dtype), *shapes), constants, states)


LIMITS = 0.05, 4.0


def run_delta(given: Inputs, table: Tensor, states: Tensor, *, in_chunks: bool = False) -> Tensor:
    return gated_delta.gated_delta(
        *on(given.tokens), states, table.to(DEVICE), plain_delta.NORM_EPS, in_chunks=in_chunks
    )


def run_mamba(given: Inputs, table: Tensor, states: Tensor, *, in_chunks: bool = False) -> Tensor:
    return mamba2.mamba2_scan(
        *on(given.tokens), on(given.constants), LIMITS, states, table.to(DEVICE), in_chunks=in_chunks
    )


def exact_delta(given: Inputs, table: Tensor) -> tuple[Tensor, Tensor]:
    states = given.states.double()
    return plain_delta.gated_delta(*(x.double() for x in given.tokens), states, table), states


def exact_mamba(given: Inputs, table: Tensor) -> tuple[Tensor, Tensor]:
    states, heads = given.states.double(), HeadConstants(*(x.double() for x in given.constants), *LIMITS)
    return plain_mamba2.mamba2_scan(*(x.double() for x in given.tokens), heads, states, table), states


def on(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return tensors on the device, with their strides."""
    return tensors if DEVICE == "cpu" else tuple(tensor.to(DEVICE) for tensor in tensors)


@pytest.mark.parametrize(
    ("sizes", "dtype", "seed"),
    mostly_long_grid([(1, 2, 16, 24), (1, 3, 8, 40), (2, 2, 64, 32)], DTYPES, range(7), every=32),
)
def test_the_delta_rule_equals_float64(sizes: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> None:
    step = random_step(seed)
    given = draw_delta(step, seed, sizes, dtype)
    right, right_states = exact_delta(given, step.table)
    states = given.states.to(DEVICE, copy=True)
    ours = run_delta(given, step.table, states)
    # A token decays, reads and writes a state of ``key_dim`` products, with a rounding each, and some follow one
    # another.
    bound = EPS * step.longest * sizes[2] * float(right_states.abs().max())
    assert ours.dtype == dtype
    assert_rounded(ours.cpu(), right, bound + unit(dtype) * right.abs())
    assert_rounded(states.cpu(), right_states, bound)
    check_untouched(step, given.states, states)


@pytest.mark.parametrize(
    ("sizes", "dtype", "seed"),
    mostly_long_grid([(1, 2, 16, 24), (1, 3, 8, 40), (2, 2, 128, 8)], DTYPES, range(7), every=32),
)
def test_mamba_2_equals_float64(sizes: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> None:
    step = random_step(seed)
    given = draw_mamba(step, seed, sizes, dtype)
    right, right_states = exact_mamba(given, step.table)
    states = given.states.to(DEVICE, copy=True)
    ours = run_mamba(given, step.table, states)
    # As of the compiled kernel on the CPU: a few roundings of a state for each token, and a sum of ``state_size``
    # products with ``c``, whose errors add up like the square root of their number.
    size = float(right_states.abs().max()) * 4
    bound = EPS * step.longest * 4 * size
    assert ours.dtype == dtype
    assert_rounded(ours.cpu(), right, bound * sizes[2] ** 0.5 + unit(dtype) * right.abs())
    assert_rounded(states.cpu(), right_states, bound)
    check_untouched(step, given.states, states)


def check_untouched(step: Step, before: Tensor, after: Tensor) -> None:
    """Check that only the slots of the segments with tokens were written."""
    written = {int(row[3]) for row in step.table if row[0] < row[1]}
    others = [slot for slot in range(step.num_slots) if slot not in written]
    assert torch.equal(after.cpu()[others], before[others])


@pytest.mark.parametrize(("width", "dtype", "seed"), mostly_long_grid([4, 2, 3], DTYPES, range(7), every=32))
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_convolution_equals_float64(width: int, dtype: torch.dtype, seed: int, *, has_bias: bool) -> None:
    """Segments longer and shorter than a tile and than the filter."""
    step, channels = random_step(seed, longest=40 if seed % 2 else 4), 70
    torch.manual_seed(shift(seed))
    x = torch.randn(step.num_tokens, channels + 9).to(dtype)[:, 5 : 5 + channels]
    weight, bias = torch.randn(width, channels), torch.randn(channels) if has_bias else None
    states = torch.randn(step.num_slots, width - 1, channels).to(dtype).float()
    right_states, ours_states = states.double(), states.to(DEVICE, copy=True)
    right = plain_convolution.causal_convolution(
        *(x.double(), weight.double(), right_states, step.table),
        activate=has_bias,
        bias=None if bias is None else bias.double(),
    )
    ours = convolution.causal_convolution(
        *(*on((x, weight)), ours_states, step.table.to(DEVICE)),
        None if bias is None else bias.to(DEVICE),
        activate=has_bias,
    )
    assert ours.dtype == dtype
    bound = EPS * (width + 5) * float(right.abs().max() + weight.abs().sum(0).max() * 4)
    assert_rounded(ours.cpu(), right, bound + unit(dtype) * right.abs())
    assert torch.equal(ours_states.cpu().double(), right_states)
    check_untouched(step, states, ours_states)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_the_delta_rule_equal_float64(dtype: torch.dtype) -> None:
    """Also of numbers so small that ``1 + exp`` of them is 1 in float32."""
    torch.manual_seed(shift(6))
    a, b = (30 * torch.randn(50, 7)).to(dtype)[:, 1:4], (30 * torch.randn(50, 7)).to(dtype)[:, 4:]
    rates, bias = -torch.rand(3), torch.randn(3)
    ours = gated_delta.delta_gates(*on((a, b, rates, bias)))
    right = plain_delta.delta_gates(*(x.double() for x in (a, b, rates, bias)))
    assert_rounded(ours[0].cpu(), right[0], 8 * EPS * right[0].abs() * (1 + (a.double() + bias).abs()) + TINY)
    assert_rounded(ours[1].cpu(), right[1], 8 * EPS)


@pytest.mark.parametrize("columns", [1, 37])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_rows_equal_float64(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(shift(8))
    gate, x = (10 * torch.randn(21, columns + 3)).to(dtype)[:, 2 : 2 + columns], torch.randn(21, 37).to(dtype)
    for silu, plain in ((False, sigmoid_mul), (True, silu_gate)):
        if silu and columns == 1:
            continue
        right = plain(gate.double(), x.double())
        ours = scale_rows(*on((gate, x)), silu=silu)
        assert ours.dtype == dtype
        assert_rounded(ours.cpu(), right, (8 * EPS + unit(dtype)) * right.abs() + TINY_HALF)


@pytest.mark.parametrize("kind", ["delta", "mamba"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_state_does_not_depend_on_the_cuts_of_its_sequence(kind: str, seed: int) -> None:
    """In one segment, token by token in several steps, and in chains beside another sequence: the same bits."""
    draw, run = (draw_delta, run_delta) if kind == "delta" else (draw_mamba, run_mamba)
    tokens = 11
    given = draw(Step(torch.empty(0), tokens, 4, tokens), seed, (1, 2, 16, 8), torch.bfloat16)
    whole, single, chained = (given.states.to(DEVICE, copy=True) for _ in range(3))
    out = run(given, torch.tensor([[0, tokens, -1, 0, 1]]), whole)
    for start, end in pairwise((0, 1, 2, 6, tokens)):
        part = given._replace(tokens=tuple(x[start:end] for x in given.tokens))
        table = torch.tensor([[0, end - start, 0 if start else -1, 0, 1]])
        assert torch.equal(run(part, table, single), out[start:end])
    cuts = torch.tensor([[0, 2, -1, 1, 3], [2, 3, 1, 3, 0], [3, tokens, 3, 0, 0], [0, 0, 0, 0, 0]])
    assert torch.equal(run(given, cuts, chained), out)
    assert torch.equal(single[0], whole[0])
    assert torch.equal(chained[0], whole[0])


def test_a_step_size_that_is_no_number_stays_none() -> None:
    given = draw_mamba(Step(torch.empty(0), 8, 4, 8), 13, (1, 2, 16, 8), torch.float32)
    given.tokens[3][3, 1] = torch.nan
    out = run_mamba(given, torch.tensor([[0, 8, -1, 0, 1]]), given.states.to(DEVICE)).cpu()
    assert out[3:, 1].isnan().all()
    assert not out[:3].isnan().any()
    assert not out[:, 0].isnan().any()


LONG = Step(
    torch.tensor(
        [[0, 1, 0, 1, 1], [1, 41, -1, 2, 2], [41, 58, 2, 3, 0], [58, 62, 4, 4, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    ),
    num_tokens=62,
    num_slots=5,
    longest=57,
)
"""A prompt that is cut where a snapshot is taken, beside two sequences with few tokens."""


@pytest.mark.parametrize(
    ("kind", "is_alike", "seed"), mostly_long_grid(["delta", "mamba"], [False, True], range(10), every=21)
)
def test_chunks_equal_float64_to_sixteen_bits(kind: str, seed: int, *, is_alike: bool) -> None:
    """Also of keys that are nearly parallel and hardly decay, as of a text that repeats itself.

    Numbers are rounded to sixteen bits before they are multiplied; the errors of a sum's terms have any sign.
    """
    if kind == "delta":
        given = draw_delta(LONG, seed, (1, 1, 16, 24), torch.bfloat16)
        if is_alike:
            given.tokens[1].mul_(0.02).add_(1)
            given.tokens[3].mul_(0.01)
            given.tokens[4].fill_(0.99)
        run, (right, right_states) = run_delta, exact_delta(given, LONG.table)
    else:
        given = draw_mamba(LONG, seed, (1, 1, 16, 24), torch.bfloat16)
        if is_alike:
            given.constants[0].mul_(0.01)
        run, (right, right_states) = run_mamba, exact_mamba(given, LONG.table)
    states, single = (given.states.to(DEVICE, copy=True) for _ in range(2))
    ours = run(given, LONG.table, states, in_chunks=True)
    assert_rounded(ours.cpu(), right, 2.0**-15 * right.abs().max() + unit(torch.bfloat16) * right.abs())
    assert_rounded(states.cpu(), right_states, 2.0**-15 * right_states.abs().max())
    check_untouched(LONG, given.states, states)
    # The short ones are computed token by token.
    plain = run(given, LONG.table, single)
    assert torch.equal(ours[:1], plain[:1])
    assert torch.equal(ours[58:], plain[58:])
    assert torch.equal(states[[1, 4]], single[[1, 4]])
    assert not torch.equal(states[3], single[3])


BUGS: list[tuple[str, str, str]] = [
    ("gated_delta", "if source != last:", "if index == first:"),  # a draft that goes on from another than the last one
    ("gated_delta", "mask=inside & (source >= 0)", "mask=inside"),
    ("gated_delta", "head // repeats", "head"),
    ("mamba2", "            last = target", "            last = source"),
    ("mamba2", "tl.where(step < least, least, step)", "step"),
    ("convolution", "(row + (end - start))", "row"),
    ("convolution", "position >= start", "position >= 0"),
    ("convolution", "tl.program_id(1)", "0"),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(("module", "right", "wrong"), mostly_long(BUGS, every=4))
def test_planted_bugs_are_detected(
    module: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"recurrent.{module}"
    bad = planted(name, right, wrong, name, tmp_path)
    function = {"gated_delta": "gated_delta", "mamba2": "mamba2_scan", "convolution": "causal_convolution"}[module]
    own = {"gated_delta": gated_delta, "mamba2": mamba2, "convolution": convolution}[module]
    monkeypatch.setattr(own, function, getattr(bad, function))
    tests: dict[str, Callable[[], None]] = {
        "gated_delta": lambda: test_the_delta_rule_equals_float64((1, 2, 8, 8), torch.float32, 1),
        "mamba2": lambda: test_mamba_2_equals_float64((1, 2, 8, 8), torch.float32, 1),
        "convolution": lambda: test_a_convolution_equals_float64(4, torch.float32, 1, has_bias=True),
    }
    # The interpreter has an error of its own for what is read outside of all tensors.
    with pytest.raises((AssertionError, InterpreterError)):
        tests[module]()


CHUNK_BUGS: list[tuple[str, str, str]] = [
    ("delta", "-tl.sum(factors", "tl.sum(factors"),
    ("mamba", "(tl.exp(whole - total) * step)", "step"),
    ("delta", "(tl.exp(whole - total) * key_factor)", "key_factor"),
    ("delta", "(x - high.to(tl.float32))", "(0 * x)"),  # eight bits
    ("mamba", "total = tl.cumsum(step * rate, axis=0)", "total = step * rate"),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(("kind", "right", "wrong"), mostly_long(CHUNK_BUGS, every=5))
def test_planted_bugs_of_chunks_are_detected(
    kind: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = planted("recurrent.chunks", right, wrong, "recurrent.chunks", tmp_path)
    monkeypatch.setattr(gated_delta, "delta_chunks", bad.delta_chunks)
    monkeypatch.setattr(mamba2, "scan_chunks", bad.scan_chunks)
    with pytest.raises(AssertionError):
        test_chunks_equal_float64_to_sixteen_bits(kind, 1, is_alike=False)
