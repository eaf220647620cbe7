"""The gated delta rule; see ``kernels.recurrent.gated_delta``.

The matrix of a head is read and written twice for each token, and stays in the second-level cache meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import float32_array, function, int64_array, kernel, read_arguments, split_range
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.simd.exp import exp32

_EPS = np.float32(1e-6)
_MIN_VALUES_FOR_THREADS = 1 << 14
"""Values of all states that are read, below which one thread is done before a second one has started."""


def delta_gates(a: Tensor, b: Tensor, rates: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """``kernels.recurrent.gated_delta.delta_gates`` of float32 tensors whose rows are contiguous."""
    decay, beta = empty(*a.shape), empty(*b.shape)
    _delta_gates(a, b, rates, bias, decay, beta, len(a), a.shape[1], a.stride(0), b.stride(0), threads=1)
    return decay, beta


@kernel
def _delta_gates(address: Any) -> None:
    """Arguments ``(a, b, rates, bias, decay, beta, tokens, heads, row of a, row of b)``; a row of
    ``a`` is that many numbers behind the one before.
    """
    words, _, _ = read_arguments(address)
    shape = words[6], words[7]
    a, b = float32_array(words[0], (words[6], words[8])), float32_array(words[1], (words[6], words[9]))
    rates, bias = float32_array(words[2], words[7]), float32_array(words[3], words[7])
    decay, beta = float32_array(words[4], shape), float32_array(words[5], shape)
    for token in range(words[6]):
        for head in range(words[7]):
            x = a[token, head] + bias[head]
            # The logarithm of 1 + exp(x), which is x where the exponential would exceed it by 2^24 and more.
            softplus = x if x > np.float32(20) else np.float32(np.log1p(np.float64(exp32(x))))
            decay[token, head] = rates[head] * softplus
            beta[token, head] = np.float32(1) / (np.float32(1) + exp32(np.float32(-b[token, head])))


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, segments: Tensor
) -> Tensor:
    """``kernels.recurrent.gated_delta.gated_delta`` of float32 tensors, of which only rows of tokens may lie apart."""
    (tokens, heads, value_dim), (_, key_heads, key_dim) = v.shape, k.shape
    out, changes = empty(tokens, heads, value_dim), empty(heads, value_dim)
    threads = 1 if tokens * heads * key_dim * value_dim < _MIN_VALUES_FOR_THREADS else None
    tensors = q, k, v, decay, beta, states, segments, out
    counts = len(segments), len(states), tokens, heads, key_heads, key_dim, value_dim
    strides = q.stride(0), k.stride(0), v.stride(0)
    _gated_delta(*tensors, *counts, *strides, changes, threads=threads)
    return out


@kernel
def _gated_delta(address: Any) -> None:
    """Arguments ``(q, k, v, decay, beta, states, segments, out, segments, slots, tokens, heads, key_heads, key_dim,
    value_dim, row of q, of k, of v, changes)``; a row is that many numbers behind the one before, and ``changes``
    ``[heads, value_dim]`` is scratch. Threads divide the heads.
    """
    a, thread, threads = read_arguments(address)
    tokens, heads, key_heads, key_dim, value_dim = a[10], a[11], a[12], a[13], a[14]
    out, changes = float32_array(a[7], (tokens, heads, value_dim)), float32_array(a[18], (heads, value_dim))
    decay, beta = float32_array(a[3], (tokens, heads)), float32_array(a[4], (tokens, heads))
    states, segments = float32_array(a[5], (a[9], heads, key_dim, value_dim)), int64_array(a[6], (a[8], 5))
    first, last = split_range(heads, thread, threads)
    for head in range(first, last):
        to_key, to_value = 4 * key_dim * (head * key_heads // heads), 4 * value_dim * head
        for index in range(a[8]):
            source, target = segments[index, 2], segments[index, 3]
            if segments[index, 0] == segments[index, 1]:
                continue
            state = states[target, head]
            if source < 0:
                state[:] = 0
            elif source != target:
                state[:] = states[source, head]
            for token in range(segments[index, 0], segments[index, 1]):
                rate, share = exp32(decay[token, head]), beta[token, head]
                q = float32_array(a[0] + 4 * a[15] * token + to_key, key_dim)
                k = float32_array(a[1] + 4 * a[16] * token + to_key, key_dim)
                v = float32_array(a[2] + 4 * a[17] * token + to_value, value_dim)
                _step(state, q, k, v, rate, share, changes[head], out[token, head])


@function
def _step(state: Any, q: Any, k: Any, v: Any, rate: Any, share: Any, change: Any, out: Any) -> None:
    """Advance one head's state by a token. ``change`` ``[value_dim]`` is scratch."""
    key_dim, value_dim = state.shape
    squares_q, squares_k = np.float32(0), np.float32(0)
    for i in range(key_dim):
        squares_q += q[i] * q[i]
        squares_k += k[i] * k[i]
    scale_q = np.float32(1) / np.sqrt((squares_q + _EPS) * np.float32(key_dim))
    scale_k = np.float32(1) / np.sqrt(squares_k + _EPS)
    for j in range(value_dim):
        out[j] = 0
    for i in range(key_dim):
        row, key = state[i], k[i] * scale_k
        for j in range(value_dim):
            kept = row[j] * rate
            row[j] = kept
            out[j] += key * kept
    for j in range(value_dim):
        change[j] = (v[j] - out[j]) * share
        out[j] = 0
    for i in range(key_dim):
        row, key, query = state[i], k[i] * scale_k, q[i] * scale_q
        for j in range(value_dim):
            changed = row[j] + key * change[j]
            row[j] = changed
            out[j] += query * changed
