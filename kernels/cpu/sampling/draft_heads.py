"""Operators of Medusa's and Hydra's draft heads, beside matrix products and norms."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import as_float, float32_array, kernel, read_arguments
from kernels.cpu.runtime.recorder import empty


def concat_normalized(states: Tensor, embeddings: Tensor, eps: float) -> Tensor:
    """Return ``[x / rms(x); embeddings]``, ``[rows, 2 n]``, of ``x`` ``states``; both contiguous, ``[rows, n]``."""
    rows, size = states.shape
    out = empty(rows, 2 * size)
    _concat_normalized(states, embeddings, out, rows, size, eps, threads=1)
    return out


def add_to_blocks(base: Tensor, blocks: Tensor, count: int) -> Tensor:
    """Return the first ``count`` blocks of each row plus the first ``n`` numbers of the row's ``base``.

    ``base``: ``[rows, n or more]``, ``blocks``: ``[rows, count or more, n]``, both contiguous. Returns ``[rows * count,
    n]``.
    """
    rows, max_blocks, size = blocks.shape
    out = empty(rows * count, size)
    _add_to_blocks(base, blocks, out, rows, base.shape[1], max_blocks, size, count, threads=1)
    return out


@kernel
def _concat_normalized(address: Any) -> None:
    a, _, _ = read_arguments(address)
    rows, size = a[3], a[4]
    states, embeddings = float32_array(a[0], (rows, size)), float32_array(a[1], (rows, size))
    out = float32_array(a[2], (rows, 2, size))
    for row in range(rows):
        total = np.float32(0)
        for i in range(size):
            total += states[row, i] * states[row, i]
        factor = np.float32(1 / np.sqrt(np.float64(total) / size + as_float(a[5])))
        for i in range(size):
            out[row, 0, i] = states[row, i] * factor
            out[row, 1, i] = embeddings[row, i]


@kernel
def _add_to_blocks(address: Any) -> None:
    a, _, _ = read_arguments(address)
    rows, width, max_blocks, size, count = a[3], a[4], a[5], a[6], a[7]
    base, blocks = float32_array(a[0], (rows, width)), float32_array(a[1], (rows, max_blocks, size))
    out = float32_array(a[2], (rows, count, size))
    for row in range(rows):
        for block in range(count):
            for i in range(size):
                out[row, block, i] = base[row, i] + blocks[row, block, i]
