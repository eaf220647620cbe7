"""Layers with states, compiled for Hopper at the sizes of published models: nothing is spilled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.triton import activation
from kernels.triton.recurrent import convolution, gated_delta, mamba2
from tests.kernels.triton.hopper import compiling
from tests.long import mostly_long

F32, I64, BF16 = torch.float32, torch.int64, torch.bfloat16
TOKENS, SLOTS = 16, 40


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


SEGMENTS = empty(TOKENS, 5, dtype=I64)


def convolve(channels: int, width: int, *, has_bias: bool) -> None:
    states, bias = empty(SLOTS, width - 1, channels, dtype=F32), empty(channels, dtype=F32) if has_bias else None
    x, weight = empty(TOKENS, 2 * channels)[:, :channels], empty(width, channels, dtype=F32)
    convolution.causal_convolution(x, weight, states, SEGMENTS, bias, activate=True)


def delta(key_heads: int, heads: int, key_dim: int, value_dim: int, *, in_chunks: bool = False) -> None:
    """As of Qwen3-Next and Qwen3.5."""
    wide = empty(TOKENS, 2 * key_heads * key_dim + heads * value_dim)
    q = k = wide[:, : key_heads * key_dim].view(TOKENS, key_heads, key_dim)
    v = wide[:, 2 * key_heads * key_dim :].view(TOKENS, heads, value_dim)
    gates = empty(TOKENS, heads, dtype=F32)
    states = empty(SLOTS, heads, key_dim, value_dim, dtype=F32)
    gated_delta.gated_delta(q, k, v, gates, gates, states, SEGMENTS, 1e-6, in_chunks=in_chunks)


def scan(groups: int, heads: int, state_size: int, head_dim: int, *, in_chunks: bool = False) -> None:
    """As of Nemotron-H and Granite 4."""
    b, constants = empty(TOKENS, groups, state_size), (empty(heads, dtype=F32),) * 3
    states = empty(SLOTS, heads, state_size, head_dim, dtype=F32)
    inputs = empty(TOKENS, heads, head_dim), b, b, empty(TOKENS, heads)
    mamba2.mamba2_scan(*inputs, constants, (0.0, float("inf")), states, SEGMENTS, in_chunks=in_chunks)


def gates() -> None:
    gated_delta.delta_gates(empty(TOKENS, 32), empty(TOKENS, 32), empty(32, dtype=F32), empty(32, dtype=F32))


CASES: list[tuple[str, Callable[[], object], int, float]] = [
    ("delta rule of 128", lambda: delta(16, 32, 128, 128), 128, 0.25),
    ("Mamba-2 of 128 by 64", lambda: scan(8, 128, 128, 64), 128, 0.25),
    ("Mamba-2 of 256 by 64", lambda: scan(1, 24, 256, 64), 200, 0.15),
    ("delta rule of 64", lambda: delta(16, 16, 64, 64), 112, 0.25),
    ("convolution of 4", lambda: convolve(8192, 4, has_bias=False), 112, 0.25),
    ("convolution of 4 with a bias", lambda: convolve(8192, 4, has_bias=True), 112, 0.25),
    ("convolution of 3", lambda: convolve(2048, 3, has_bias=False), 112, 0.25),
    ("delta rule of 128 in chunks", lambda: delta(16, 32, 128, 128, in_chunks=True), 255, 0.12),
    ("delta rule of 64 in chunks", lambda: delta(16, 16, 64, 64, in_chunks=True), 255, 0.12),
    ("Mamba-2 of 128 by 64 in chunks", lambda: scan(8, 128, 128, 64, in_chunks=True), 255, 0.12),
    ("Mamba-2 of 256 by 64 in chunks", lambda: scan(1, 24, 256, 64, in_chunks=True), 255, 0.12),
    ("gates of the delta rule", gates, 64, 0.5),
    ("silu gate", lambda: activation.scale_rows(empty(TOKENS, 4096), empty(TOKENS, 4096), silu=True), 64, 0.5),
]


@pytest.mark.parametrize(
    ("launch", "registers", "occupancy"),
    mostly_long([pytest.param(*case[1:], id=case[0]) for case in CASES], every=13),
)
def test_compiled_kernels_meet_their_limits(launch: Callable[[], object], registers: int, occupancy: float) -> None:
    with compiling() as made:
        launch()
    kernel = made[-1]
    assert kernel.spills == kernel.stack == 0, kernel
    assert kernel.registers <= registers, kernel
    assert kernel.occupancy >= occupancy, kernel
