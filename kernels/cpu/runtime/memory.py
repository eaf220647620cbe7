"""Memory for weights, keys and values."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = 2 << 20
"""Bytes of a huge page."""


def resident(size: int) -> Tensor:
    """``size`` zeros, float32, that will be read again and again, in huge pages where the system has them.

    The processor reads ahead within a page only: with pages of 4 KB a fifth less is read in the same time.
    """
    # The last page is a huge one where half of it or more is needed.
    bulk = (4 * size + _HUGE // 2) // _HUGE * _HUGE
    if not bulk or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size)
    # What is not touched costs nothing, so there is always room to begin at a page's boundary.
    memory = mmap.mmap(-1, 4 * size + 2 * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    floats = torch.frombuffer(memory, dtype=torch.float32)
    start = -floats.data_ptr() % _HUGE
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, bulk)
    return floats[start // 4 :][:size]
