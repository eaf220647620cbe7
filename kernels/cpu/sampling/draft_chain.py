"""Positions and slots of the tokens of draft chains, and rows gathered from tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import as_float, float32_array, int64_array, kernel, read_arguments
from kernels.cpu.runtime.recorder import empty


def plan_chains(
    starts: Tensor, pages: int, columns: int, page_size: int, plan: Tensor, last: Tensor, depth: Tensor
) -> None:
    """Write where all tokens of the branches' chains lie, level by level: the due tokens, then one draft token a level.

    ``starts``: ``[branches, 3]``, row of the page table, number of tokens, and how many of these are due. ``pages``:
    the address of the page table, int64 ``[rows, columns]``. ``depth`` ``[1]``: the number of levels. ``plan`` ``[4,
    tokens]`` gets rows, numbers of keys that the token sees, slots and positions; ``last`` ``[branches]`` the index of
    each branch's last due token. All int64.
    """
    _plan_chains(starts, pages, plan, last, len(starts), columns, page_size, plan.shape[1], depth, threads=1)


def gather_rows(table: Tensor, index: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return ``scale * table[index]``, written to ``out`` if that is given.

    ``table``: contiguous float32 ``[any, n]``; ``index``: int64 ``[rows]`` of any stride; ``out``: contiguous ``[rows,
    n]``.
    """
    rows, size = len(index), table.shape[1]
    out = empty(rows, size) if out is None else out
    _gather_rows(table, index, out, rows, size, index.stride(0), scale, threads=1)
    return out


@kernel
def _plan_chains(address: Any) -> None:
    a, _, _ = read_arguments(address)
    branches, columns, page_size, tokens, depth = a[4], a[5], a[6], a[7], int64_array(a[8], (1,))[0]
    starts, plan = int64_array(a[0], (branches, 3)), int64_array(a[2], (4, tokens))
    last = int64_array(a[3], (branches,))
    token = 0
    for level in range(depth):
        for branch in range(branches):
            row, length, due = starts[branch, 0], starts[branch, 1], starts[branch, 2]
            pages = int64_array(a[1] + 8 * row * columns, (columns,))
            first, end = (length - due, length) if level == 0 else (length + level - 1, length + level)
            for position in range(first, end):
                plan[0, token], plan[1, token] = row, position + 1
                plan[2, token] = pages[position // page_size] * page_size + position % page_size
                plan[3, token] = position
                token += 1
            if level == 0:
                last[branch] = token - 1


@kernel
def _gather_rows(address: Any) -> None:
    a, _, _ = read_arguments(address)
    rows, size, stride, scale = a[3], a[4], a[5], np.float32(as_float(a[6]))
    index, out = int64_array(a[1], (rows * stride,)), float32_array(a[2], (rows, size))
    for row in range(rows):
        source = float32_array(a[0] + 4 * size * index[row * stride], (size,))
        for i in range(size):
            out[row, i] = scale * source[i]
