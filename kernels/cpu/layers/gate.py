"""Sigmoid gates in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.layers.elementwise import contiguous
from kernels.cpu.runtime.kernel import float32_array, kernel, read_arguments, split_range
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.simd.exp import exp32

_MIN_RESULTS_FOR_THREADS = 1 << 14
"""With fewer results one thread is done before a second one has started."""


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """``kernels.layers.gate.sigmoid_mul`` of float32 tensors."""
    gate, x = contiguous(gate), contiguous(x)
    out, count = empty(*x.shape), x.numel()
    shape = count, count // gate.numel()
    _sigmoid_mul(gate, x, out, *shape, threads=1 if count < _MIN_RESULTS_FOR_THREADS else None)
    return out


@kernel
def _sigmoid_mul(address: Any) -> None:
    """Arguments ``(gate, x, out, count, width)``: a gate is for ``width`` consecutive numbers of ``count``."""
    a, thread, threads = read_arguments(address)
    count, width = a[3], a[4]
    gates, x, out = float32_array(a[0], count // width), float32_array(a[1], count), float32_array(a[2], count)
    first, end = split_range(count // width, thread, threads)
    if width == 1:
        for index in range(first, end):
            out[index] = x[index] / (np.float32(1) + exp32(np.float32(-gates[index])))
        return
    for index in range(first, end):
        share = np.float32(1) / (np.float32(1) + exp32(np.float32(-gates[index])))
        for i in range(index * width, (index + 1) * width):
            out[i] = x[i] * share
