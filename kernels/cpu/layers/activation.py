"""Gated activations in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.layers.elementwise import contiguous
from kernels.cpu.runtime.kernel import (
    Kernel,
    as_float,
    float32_array,
    function,
    kernel,
    named_function,
    read_arguments,
    split_range,
)
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.simd.exp import exp32

_MIN_RESULTS_FOR_THREADS = 1 << 14
"""With fewer results one thread is done before a second one has started."""
# gelu(x) = x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))), since (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).
_LINEAR = np.float32(-2 * np.sqrt(2 / np.pi))
_CUBIC = np.float32(-2 * np.sqrt(2 / np.pi) * 0.044715)
_ONE = np.float32(1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``kernels.layers.activation.silu_mul`` of a float32 tensor."""
    return _gate(_silu_mul, gate_up.chunk(2, dim=1))


def silu_gate(gate: Tensor, x: Tensor) -> Tensor:
    """``kernels.layers.activation.silu_gate`` of float32 tensors."""
    return _gate(_silu_mul, (gate, x))


def relu_squared(x: Tensor) -> Tensor:
    """``kernels.layers.activation.relu_squared`` of a float32 tensor."""
    x, out = contiguous(x), empty(*x.shape)
    _relu_squared(x, out, x.numel(), threads=1 if x.numel() < _MIN_RESULTS_FOR_THREADS else None)
    return out


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``kernels.layers.activation.gelu_tanh_mul`` of a float32 tensor."""
    return _gate(_gelu_tanh_mul, gate_up.chunk(2, dim=1))


def clamped_silu_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """``kernels.layers.activation.clamped_silu_mul`` of a float32 tensor."""
    return _gate(_clamped_silu_mul, gate_up.chunk(2, dim=1), alpha, limit)


def _gate(activation: Kernel, gate_up: Sequence[Tensor], *constants: float) -> Tensor:
    gate, up = gate_up
    rows, width = gate.shape
    out = empty(rows, width)
    if gate.stride(1) != 1 or up.stride(1) != 1:
        gate, up = contiguous(gate), contiguous(up)
    threads = 1 if rows * width < _MIN_RESULTS_FOR_THREADS else None
    activation(gate, up, out, rows, width, gate.stride(0), up.stride(0), *constants, threads=threads)
    return out


def _create_loop(name: str, exponent: Any) -> Any:
    """Make a function that computes a thread's part of ``gate / (1 + exp(exponent(gate))) * up``."""

    @named_function(name)
    def loop(a: Any, thread: int, threads: int) -> None:
        rows, width = a[3], a[4]
        out = float32_array(a[2], (rows, width))
        first, end = split_range(rows, thread, threads)
        for row in range(first, end):
            gate, up = float32_array(a[0] + 4 * row * a[5], width), float32_array(a[1] + 4 * row * a[6], width)
            for i in range(width):
                x = gate[i]
                out[row, i] = x / (_ONE + exp32(exponent(x))) * up[i]

    return loop


@function
def _silu(x: Any) -> Any:
    return -x


@function
def _gelu_tanh(x: Any) -> Any:
    return x * (_LINEAR + _CUBIC * (x * x))


_silu_loop, _gelu_tanh_loop = _create_loop("silu_mul", _silu), _create_loop("gelu_tanh_mul", _gelu_tanh)


@kernel
def _silu_mul(address: Any) -> None:
    _silu_loop(*read_arguments(address))


@kernel
def _gelu_tanh_mul(address: Any) -> None:
    _gelu_tanh_loop(*read_arguments(address))


@kernel
def _clamped_silu_mul(address: Any) -> None:
    a, thread, threads = read_arguments(address)
    rows, width = a[3], a[4]
    alpha, limit = np.float32(as_float(a[7])), np.float32(as_float(a[8]))
    out = float32_array(a[2], (rows, width))
    first, end = split_range(rows, thread, threads)
    for row in range(first, end):
        gates, ups = float32_array(a[0] + 4 * row * a[5], width), float32_array(a[1] + 4 * row * a[6], width)
        for i in range(width):
            # A comparison with NaN is false, so NaN stays NaN.
            gate, up = gates[i], ups[i]
            gate = limit if gate > limit else gate
            up = limit if up > limit else -limit if up < -limit else up
            out[row, i] = gate / (_ONE + exp32(np.float32(-alpha * gate))) * (up + _ONE)


@kernel
def _relu_squared(address: Any) -> None:
    a, thread, threads = read_arguments(address)
    x, out = float32_array(a[0], a[2]), float32_array(a[1], a[2])
    first, end = split_range(a[2], thread, threads)
    for i in range(first, end):
        # A comparison with NaN is false, so NaN stays NaN.
        out[i] = np.float32(0) if x[i] < 0 else x[i] * x[i]
