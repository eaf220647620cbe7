"""Memory for weights, keys and values."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
"""Size of a huge page in bytes."""


def release_free_memory() -> None:
    """Return freed memory to the system, where the C library has a function for that (glibc).

    Matrices that were converted one after the other leave a third of a small model's size behind.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def allocate_resident(size: int) -> Tensor:
    """Return ``size`` float32 zeros in huge pages, if the system has them, for memory that is read again and again.

    The hardware prefetcher stops at the end of a page: with pages of 4 KB a fifth less is read in the same time.
    """
    # The last page is a huge one if half of it or more is needed.
    num_bytes = (4 * size + _HUGE_PAGE // 2) // _HUGE_PAGE * _HUGE_PAGE
    if not num_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size)
    # Untouched memory costs nothing, so there is always room to start at the boundary of a page.
    memory = mmap.mmap(-1, 4 * size + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    floats = torch.frombuffer(memory, dtype=torch.float32)
    start = -floats.data_ptr() % _HUGE_PAGE
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, num_bytes)
    return floats[start // 4 :][:size]
