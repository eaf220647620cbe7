"""What heads that guess tokens from a hidden state need beside products and norms
(``engine.speculation.drafters.medusa``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import as_float, float32_array, kernel, read_arguments
from kernels.cpu.runtime.recorder import empty


def normal_beside(states: Tensor, beside: Tensor, eps: float) -> Tensor:
    """``[x / rms(x); beside]`` of ``states`` ``x`` and ``beside``, contiguous, ``[rows, n]`` each: ``[rows, 2 n]``."""
    rows, size = states.shape
    out = empty(rows, 2 * size)
    _normal_beside(states, beside, out, rows, size, eps, threads=1)
    return out


def sums(base: Tensor, blocks: Tensor, count: int) -> Tensor:
    """The first ``count`` blocks of each row plus the beginning of the row's ``base``.

    ``base``: ``[rows, n or more]``, ``blocks``: ``[rows, count or more, n]``, both contiguous. Returns ``[rows * count,
    n]``.
    """
    rows, most, size = blocks.shape
    out = empty(rows * count, size)
    _sums(base, blocks, out, rows, base.shape[1], most, size, count, threads=1)
    return out


@kernel
def _normal_beside(address: Any) -> None:
    a, _, _ = read_arguments(address)
    rows, size = a[3], a[4]
    states, beside, out = (
        float32_array(a[0], (rows, size)),
        float32_array(a[1], (rows, size)),
        float32_array(a[2], (rows, 2, size)),
    )
    for row in range(rows):
        total = np.float32(0)
        for i in range(size):
            total += states[row, i] * states[row, i]
        factor = np.float32(1 / np.sqrt(np.float64(total) / size + as_float(a[5])))
        for i in range(size):
            out[row, 0, i] = states[row, i] * factor
            out[row, 1, i] = beside[row, i]


@kernel
def _sums(address: Any) -> None:
    a, _, _ = read_arguments(address)
    rows, wide, most, size, count = a[3], a[4], a[5], a[6], a[7]
    base, blocks, out = (
        float32_array(a[0], (rows, wide)),
        float32_array(a[1], (rows, most, size)),
        float32_array(a[2], (rows, count, size)),
    )
    for row in range(rows):
        for block in range(count):
            for i in range(size):
                out[row, block, i] = base[row, i] + blocks[row, block, i]
