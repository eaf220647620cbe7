"""Short causal convolutions; see ``kernels.recurrent.convolution``."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import float32_array, int64_array, kernel, read_arguments, split_range
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.simd.exp import exp32

_MIN_VALUES_FOR_THREADS = 1 << 14
"""With fewer values one thread is done before a second one has started."""


def causal_convolution(
    x: Tensor, weight: Tensor, states: Tensor, segments: Tensor, bias: Tensor | None, *, activate: bool
) -> Tensor:
    """``kernels.recurrent.convolution.causal_convolution`` of float32 tensors whose rows are contiguous."""
    out = empty(*x.shape)
    threads = 1 if x.numel() < _MIN_VALUES_FOR_THREADS else None
    counts = len(segments), len(states), x.shape[0], x.shape[1], len(weight), int(activate), int(bias is not None)
    _convolve(x, weight, states, segments, out, *counts, weight if bias is None else bias, x.stride(0), threads=threads)
    return out


@kernel
def _convolve(address: Any) -> None:
    """Arguments ``(x, weight, states, segments, out, segments, slots, tokens, channels, width, activate,
    has_bias, bias, row)``; ``row``: numbers from a row of ``x`` to the next one. Threads divide the channels.
    """
    a, thread, threads = read_arguments(address)
    tokens, channels, width = a[7], a[8], a[9]
    before = width - 1
    x, out = float32_array(a[0], (tokens, a[13])), float32_array(a[4], (tokens, channels))
    weight, states = float32_array(a[1], (width, channels)), float32_array(a[2], (a[6], before, channels))
    segments, bias = int64_array(a[3], (a[5], 5)), float32_array(a[12], channels)
    first, last = split_range(channels, thread, threads)
    for index in range(a[5]):
        start, end, source, target = segments[index, 0], segments[index, 1], segments[index, 2], segments[index, 3]
        if start == end:
            continue
        for token in range(start, end):
            for c in range(first, last):
                out[token, c] = x[token, c] * weight[before, c]
            for back in range(1, width):
                tap = before - back
                if token - back >= start:
                    for c in range(first, last):
                        out[token, c] += x[token - back, c] * weight[tap, c]
                elif source >= 0:
                    row = before + token - back - start
                    for c in range(first, last):
                        out[token, c] += states[source, row, c] * weight[tap, c]
            if a[11]:
                for c in range(first, last):
                    out[token, c] += bias[c]
            if a[10]:
                for c in range(first, last):
                    value = out[token, c]
                    out[token, c] = value / (np.float32(1) + exp32(np.float32(-value)))
        # Ascending, so that a slot that is also read is overwritten behind what is read of it.
        for row in range(before):
            earlier = row + end - start
            for c in range(first, last):
                if earlier >= before:
                    states[target, row, c] = x[end - before + row, c]
                else:
                    states[target, row, c] = states[source, earlier, c] if source >= 0 else np.float32(0)
