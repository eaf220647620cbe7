"""Low-rank updates on the CPU: each row gets those of its own adapter added, in place.

A row's sums are in the order of the inputs and of the ranks, whatever the other rows and the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import float32_array, function, int64_array, kernel, read_arguments, split_range
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.simd.products import MAX_MIXED_ROWS, mixer
from kernels.cpu.simd.vector import splat, store

LANES = 16
"""Numbers of a vector; ranks are padded to a multiple."""
_ONE_THREAD_PRODUCTS = 1 << 18
"""Multiplications up to which one thread is done before a second one has started."""

_mix_line, _mix_wide = mixer(1), mixer(4)


def add_updates(x: Tensor, out: Tensor, indices: Tensor, table: Tensor, max_rank: int) -> None:
    """Add ``x @ down @ up`` of each row's adapter to ``out``.

    ``x``: contiguous float32 ``[rows, in]``; ``out``: contiguous float32 ``[rows, out]``; ``indices``: int64 ``[rows or
    more]``, negative for a row without an adapter, which is not touched. ``table``: int64 ``[updates, 6]``: the
    adapter, the addresses of ``down`` ``[in, rank]`` and ``up`` ``[rank, out]``, the rank, the first output that the
    update changes and their number. ``max_rank``: the largest rank.
    """
    rows, num_in = x.shape
    num_out = out.shape[1]
    scratch = empty(rows, max_rank)
    work = rows * max_rank * (num_in + num_out)
    threads = 1 if work < _ONE_THREAD_PRODUCTS else None
    _add_updates(
        x, out, indices, table, scratch, rows, num_in, num_out, len(table), max_rank, threads=threads
    )  # fmt: skip


@function
def _add_block(rows: int, x: int, out: int, h: int, num_in: int, num_out: int, entry: Any) -> None:
    """Add one update to up to ``MAX_MIXED_ROWS`` rows. ``h``: scratch for their products with ``down``."""
    down, up, rank, first, count = entry[1], entry[2], entry[3], entry[4], entry[5]
    stride_in, stride_h, stride_out = 4 * num_in, 4 * rank, 4 * num_out
    for i in range(0, rows * stride_h, 64):
        store(h + i, splat(np.float32(0)))
    for i in range(0, stride_h, 64):
        _mix_line(rows, h + i, x, stride_in, down + i, stride_h, num_in, down + i)
    start, wide_end, end = 4 * first, 4 * (first + count // 64 * 64), 4 * (first + count // 16 * 16)
    for i in range(start, wide_end, 256):
        _mix_wide(rows, out + i, h, stride_h, up + i, stride_out, rank, up + i)
    for i in range(wide_end, end, 64):
        _mix_line(rows, out + i, h, stride_h, up + i, stride_out, rank, up + i)
    factors, weights = float32_array(h, (rows, rank)), float32_array(up, (rank, num_out))
    results = float32_array(out, (rows, num_out))
    for row in range(rows):
        for column in range(end // 4, first + count):
            for index in range(rank):
                results[row, column] += factors[row, index] * weights[index, column]


@kernel
def _add_updates(address: Any) -> None:
    """Arguments ``(x, out, indices, table, scratch, rows, num_in, num_out, num_updates, max_rank)``."""
    a, thread, threads = read_arguments(address)
    rows, num_in, num_out, num_updates, max_rank = a[5], a[6], a[7], a[8], a[9]
    indices, table = int64_array(a[2], (rows,)), int64_array(a[3], (num_updates, 6))
    row, end = split_range(rows, thread, threads)
    while row < end:
        adapter = indices[row]
        count = 1
        while row + count < end and count < MAX_MIXED_ROWS and indices[row + count] == adapter:
            count += 1
        if adapter >= 0:
            for index in range(num_updates):
                if table[index, 0] == adapter:
                    x, out, h = a[0] + 4 * num_in * row, a[1] + 4 * num_out * row, a[4] + 4 * max_rank * row
                    _add_block(count, x, out, h, num_in, num_out, table[index])
        row += count
