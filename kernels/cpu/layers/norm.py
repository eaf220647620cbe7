"""RMSNorm in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.layers.elementwise import contiguous
from kernels.cpu.runtime.kernel import as_float, float32_array, kernel, read_arguments, split_range
from kernels.cpu.runtime.recorder import empty

_MIN_VALUES_FOR_THREADS = 1 << 14
"""With fewer values one thread is done before a second one has started."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``kernels.layers.norm.rms_norm`` of float32 tensors."""
    out = empty(*x.shape)
    size = x.shape[-1]
    rows = x.numel() // size
    threads = 1 if x.numel() < _MIN_VALUES_FOR_THREADS else None
    _rms_norm(contiguous(x), weight, out, rows, size, weight.numel() // size, eps, threads=threads)
    return out


@kernel
def _rms_norm(address: Any) -> None:
    a, thread, threads = read_arguments(address)
    rows, size, heads = a[3], a[4], a[5]
    x, weight, out = (
        float32_array(a[0], (rows, size)),
        float32_array(a[1], (heads, size)),
        float32_array(a[2], (rows, size)),
    )
    first, end = split_range(rows, thread, threads)
    for row in range(first, end):
        total = np.float32(0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        factor = np.float32(1 / np.sqrt(np.float64(total) / size + as_float(a[6])))
        head = row % heads
        for i in range(size):
            out[row, i] = x[row, i] * factor * weight[head, i]
