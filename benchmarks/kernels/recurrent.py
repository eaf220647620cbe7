"""Layers that keep a state of fixed size: decoding of some sequences, and one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.measure import Case, Run, Runs
from kernels.recurrent.convolution import causal_convolution
from kernels.recurrent.gated_delta import gated_delta
from kernels.recurrent.mamba2 import HeadConstants, mamba2_scan

_WIDTH = 4


class Sizes(NamedTuple):
    """Sizes of a layer's states."""

    groups: int
    """Heads of keys, or groups of heads that share what is written and read."""
    heads: int
    rows: int
    """Rows of a head's matrix: dimensions of a key, or the size of a state."""
    columns: int


DELTA, MAMBA = Sizes(16, 32, 128, 128), Sizes(8, 128, 128, 64)
"""Sizes of Qwen3-Next and of Nemotron-H."""


def cases(
    batches: tuple[int, ...] = (1, 16, 64, 256), prompt: int = 4096, delta: Sizes = DELTA, mamba: Sizes = MAMBA
) -> Iterator[Case]:
    """Yield the gated delta rule, Mamba-2 and a convolution for a token of some sequences, and for one prompt."""
    for name, sizes, build in (("delta rule", delta, _delta), ("Mamba-2", mamba, _mamba)):
        state, token = sizes.heads * sizes.rows * sizes.columns, sizes.heads * sizes.columns + sizes.groups * sizes.rows
        for batch, length in (*((batch, 1) for batch in batches), (1, prompt)):
            moved = batch * (2 * 4 * state + length * 2 * 2 * token)
            yield Case(f"{name}, {batch} × {length}", moved, partial(build, batch=batch, length=length, sizes=sizes))
    channels = 2 * delta.groups * delta.rows + delta.heads * delta.columns
    for batch, length in (*((batch, 1) for batch in batches), (1, prompt)):
        moved = batch * channels * (2 * 4 * (_WIDTH - 1) + 2 * 2 * length)
        build = partial(_convolve, batch=batch, length=length, channels=channels)
        yield Case(f"convolution of {channels} channels, {batch} × {length}", moved, build)


def _list_segments(batch: int, length: int, device: torch.device) -> Tensor:
    """Return segments that read some slots and write others, so that each call computes the same."""
    rows = [(index * length, (index + 1) * length, index, batch + index, 1) for index in range(batch)]
    return torch.tensor(rows, device=device)


def _draw(tokens: int, *shape: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, *shape, device=device, dtype=torch.bfloat16)


def _on_cpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu() for tensor in tensors)


def _delta(device: torch.device, batch: int, length: int, sizes: Sizes) -> Runs:
    groups, heads, rows, columns = sizes
    tokens = batch * length
    q, k, v = (_draw(tokens, *shape, device=device) for shape in ((groups, rows), (groups, rows), (heads, columns)))
    decay, beta = (torch.rand(tokens, heads, device=device) for _ in range(2))
    states = torch.randn(2 * batch, heads, rows, columns, device=device)
    given = q, k, v, -decay, beta, states, _list_segments(batch, length, device)
    return _compare(lambda: gated_delta(*given, in_chunks=True), lambda: gated_delta(*_on_cpu(*given)))


def _mamba(device: torch.device, batch: int, length: int, sizes: Sizes) -> Runs:
    groups, heads, rows, columns = sizes
    tokens = batch * length
    x, dt = _draw(tokens, heads, columns, device=device), _draw(tokens, heads, device=device)
    b, c = (_draw(tokens, groups, rows, device=device) for _ in range(2))
    rates, bias, skips = (torch.rand(heads, device=device) for _ in range(3))
    states = torch.randn(2 * batch, heads, rows, columns, device=device)
    segments = _list_segments(batch, length, device)
    constants = HeadConstants(-rates, bias, skips, 0.0, float("inf"))

    def expect() -> Tensor:
        own = constants._replace(rates=-rates.cpu(), bias=bias.cpu(), skips=skips.cpu())
        x_cpu, b_cpu, c_cpu, dt_cpu, states_cpu, segments_cpu = _on_cpu(x, b, c, dt, states, segments)
        return mamba2_scan(x_cpu, b_cpu, c_cpu, dt_cpu, own, states=states_cpu, segments=segments_cpu)

    return _compare(
        lambda: mamba2_scan(x, b, c, dt, constants, states=states, segments=segments, in_chunks=True), expect
    )


def _convolve(device: torch.device, batch: int, length: int, channels: int) -> Runs:
    x = _draw(batch * length, channels, device=device)
    weight, states = torch.randn(_WIDTH, channels, device=device), torch.randn(2 * batch, _WIDTH - 1, channels)
    given = x, weight, states.to(device), _list_segments(batch, length, device)
    return _compare(
        lambda: causal_convolution(*given, activate=True),
        lambda: causal_convolution(*_on_cpu(*given), activate=True),
    )


def _compare(ours: Run, expected: Run) -> Runs:
    # The largest result of many tokens, in 16 bits.
    return Runs(ours, {}, lambda: expected().to(ours().device), 0.01)
