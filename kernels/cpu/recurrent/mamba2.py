"""The recurrence of Mamba-2; see ``kernels.recurrent.mamba2``.

The matrix of a head is read and written once for each token, and stays in the first- or second-level cache meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import (
    as_float,
    float32_array,
    function,
    int64_array,
    kernel,
    read_arguments,
    split_range,
)
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.simd.exp import exp32

_MIN_VALUES_FOR_THREADS = 1 << 14
"""Values of all states that are read, below which one thread is done before a second one has started."""


def mamba2_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    constants: tuple[Tensor, Tensor, Tensor, float, float],
    states: Tensor,
    segments: Tensor,
) -> Tensor:
    """``kernels.recurrent.mamba2.mamba2_scan`` of float32 tensors, of which only rows of tokens may lie apart.

    ``constants``: ``kernels.recurrent.mamba2.HeadConstants``.
    """
    rates, bias, skips, least, most = constants
    (tokens, num_heads, head_dim), (_, groups, state_size) = x.shape, b.shape
    out = empty(tokens, num_heads, head_dim)
    threads = 1 if tokens * num_heads * state_size * head_dim < _MIN_VALUES_FOR_THREADS else None
    tensors = x, b, c, dt, rates, bias, skips, states, segments, out
    counts = len(segments), len(states), tokens, num_heads, groups, state_size, head_dim
    strides = x.stride(0), b.stride(0), c.stride(0), dt.stride(0)
    _mamba2_scan(*tensors, *counts, float(least), float(most), *strides, threads=threads)
    return out


@kernel
def _mamba2_scan(address: Any) -> None:
    """Arguments ``(x, b, c, dt, rates, bias, skips, states, segments, out, segments, slots, tokens, heads, groups,
    state_size, head_dim, least, most, row of x, of b, of c, of dt)``; a row is that many numbers behind the one before.
    Threads divide the heads.
    """
    a, thread, threads = read_arguments(address)
    tokens, heads, groups, state_size, head_dim = a[12], a[13], a[14], a[15], a[16]
    out, dt = float32_array(a[9], (tokens, heads, head_dim)), float32_array(a[3], (tokens, a[22]))
    rates, bias, skips = float32_array(a[4], heads), float32_array(a[5], heads), float32_array(a[6], heads)
    states, segments = float32_array(a[7], (a[11], heads, state_size, head_dim)), int64_array(a[8], (a[10], 5))
    least, most = np.float32(as_float(a[17])), np.float32(as_float(a[18]))
    first, last = split_range(heads, thread, threads)
    for head in range(first, last):
        to_input, to_group = 4 * head_dim * head, 4 * state_size * (head * groups // heads)
        for index in range(a[10]):
            source, target = segments[index, 2], segments[index, 3]
            if segments[index, 0] == segments[index, 1]:
                continue
            state = states[target, head]
            if source < 0:
                state[:] = 0
            elif source != target:
                state[:] = states[source, head]
            for token in range(segments[index, 0], segments[index, 1]):
                size = _step_size(dt[token, head] + bias[head], least, most)
                decay, result = exp32(np.float32(size * rates[head])), out[token, head]
                x = float32_array(a[0] + 4 * a[19] * token + to_input, head_dim)
                b = float32_array(a[1] + 4 * a[20] * token + to_group, state_size)
                c = float32_array(a[2] + 4 * a[21] * token + to_group, state_size)
                for i in range(head_dim):
                    result[i] = skips[head] * x[i]
                _advance(state, x, b, c, size, decay, result)


@function
def _step_size(x: Any, least: Any, most: Any) -> Any:
    # The logarithm of 1 + exp(x), which is x where the exponential would exceed it by 2^24 and more.
    size = x if x > np.float32(20) else np.float32(np.log1p(np.float64(exp32(x))))
    # A comparison with NaN is false, so NaN stays NaN.
    size = least if size < least else size
    return most if size > most else size


@function
def _advance(state: Any, x: Any, b: Any, c: Any, size: Any, decay: Any, out: Any) -> None:
    """Advance one head's state by a token, and add what the token reads of it to ``out``."""
    state_size, head_dim = state.shape
    for i in range(state_size):
        row, write, read = state[i], b[i] * size, c[i]
        for j in range(head_dim):
            value = row[j] * decay + write * x[j]
            row[j] = value
            out[j] += read * value
