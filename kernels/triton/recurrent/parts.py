"""Parts of a head's matrix, each of which a program of one warp keeps in its registers."""

from __future__ import annotations

import triton
from torch import Tensor

_PART = 1024
"""Numbers of a part: 32 registers of each thread, so that a multiprocessor has room for all its programs."""
_MIN_COLUMNS = 8
"""Columns of a part: fewer are not a whole sector of 32 bytes of memory."""


def choose_part(rows: int, columns: int) -> tuple[int, int]:
    """Return the sizes of a part of a matrix: all its rows, and a few columns, both rounded up to powers of two."""
    rows = triton.next_power_of_2(rows)
    return rows, min(max(_MIN_COLUMNS, _PART // rows), triton.next_power_of_2(columns))


def align_rows(x: Tensor) -> Tensor:
    """Return ``x`` ``[tokens, heads, n]`` with the numbers of a token side by side; tokens may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
