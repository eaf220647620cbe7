"""Where the tokens of a chain of guesses lie (``engine.speculation.drafters.fused_chain``), and rows of tables that
they choose."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import as_float, float32_array, int64_array, kernel, read_arguments
from kernels.cpu.runtime.recorder import empty


def lay_out(
    starts: Tensor, pages: int, columns: int, page_size: int, plan: Tensor, last: Tensor, depth: Tensor
) -> None:
    """Writes the places of all tokens of some branches' chains, level by level: first those that are due, then a guess
    of each branch. ``depth`` ``[1]``: so many levels.

    ``starts``: ``[branches, 3]`` row of the page table, tokens, and how many of these are due. ``pages``: the address
    of the page table, int64 ``[rows, columns]``. ``plan`` ``[4, tokens]`` gets rows, keys that a token sees, slots and
    positions, ``last`` ``[branches]`` which of the tokens that are due is the last of each branch. All int64.
    """
    _lay_out(starts, pages, plan, last, len(starts), columns, page_size, plan.shape[1], depth, threads=1)


def rows_of(table: Tensor, index: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """``scale * table[index]`` of a contiguous float32 ``table`` ``[any, n]`` and int64 ``index`` ``[rows]`` of any
    stride, in contiguous ``out`` ``[rows, n]`` or what is returned."""
    rows, size = len(index), table.shape[1]
    out = empty(rows, size) if out is None else out
    _rows_of(table, index, out, rows, size, index.stride(0), scale, threads=1)
    return out


@kernel
def _lay_out(address: Any) -> None:
    a, _, _ = read_arguments(address)
    branches, columns, page_size, tokens, depth = a[4], a[5], a[6], a[7], int64_array(a[8], (1,))[0]
    starts, plan, last = (
        int64_array(a[0], (branches, 3)),
        int64_array(a[2], (4, tokens)),
        int64_array(a[3], (branches,)),
    )
    token = 0
    for level in range(depth):
        for branch in range(branches):
            row, end, due = starts[branch, 0], starts[branch, 1], starts[branch, 2]
            pages = int64_array(a[1] + 8 * row * columns, (columns,))
            first, behind = (end - due, end) if level == 0 else (end + level - 1, end + level)
            for position in range(first, behind):
                plan[0, token], plan[1, token] = row, position + 1
                plan[2, token] = pages[position // page_size] * page_size + position % page_size
                plan[3, token] = position
                token += 1
            if level == 0:
                last[branch] = token - 1


@kernel
def _rows_of(address: Any) -> None:
    a, _, _ = read_arguments(address)
    rows, size, stride, scale = a[3], a[4], a[5], np.float32(as_float(a[6]))
    index, out = int64_array(a[1], (rows * stride,)), float32_array(a[2], (rows, size))
    for row in range(rows):
        source = float32_array(a[0] + 4 * size * index[row * stride], (size,))
        for i in range(size):
            out[row, i] = scale * source[i]
