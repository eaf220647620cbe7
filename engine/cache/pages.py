"""Reference-counted pages of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush


class PagePool:
    """Free list and reference counts of ``size`` pages.

    A reference belongs to a sequence whose page table lists the page, or to the radix tree. A page returns to the free
    list with its last reference, so no page is allocated that can still be read.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ref_counts = [0] * size
        # A heap of page numbers: branches that decode side by side allocate their pages at the same time and read them
        # one after the other, which is faster the closer together they lie.
        self._free = list(range(size))
        self.high_water_mark = 0
        """Number of leading pages that include every page ever allocated."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """Return the first free page, with one reference; ``None`` if there is none."""
        if not self._free:
            return None
        page = heappop(self._free)
        self.ref_counts[page] = 1
        self.high_water_mark = max(self.high_water_mark, page + 1)
        return page

    def incref(self, pages: Sequence[int]) -> list[int]:
        """Add a reference to each of some allocated pages. Returns the new counts."""
        counts = self.ref_counts
        for page in pages:
            if counts[page] < 1:
                raise RuntimeError(f"page {page} is free and cannot be referenced")
            counts[page] += 1
        return [counts[page] for page in pages]

    def decref(self, pages: Sequence[int]) -> list[int]:
        """Remove a reference from each of some pages. Returns the new counts; a page is free at zero."""
        counts = self.ref_counts
        for page in pages:
            if counts[page] < 1:
                raise RuntimeError(f"page {page} is free and cannot be released")
            counts[page] -= 1
            if counts[page] == 0:
                heappush(self._free, page)
        return [counts[page] for page in pages]

    def check(self, references: Iterable[int]) -> None:
        """Raise ``RuntimeError`` unless the references are exactly these (each page as often as it is referenced)."""
        expected = [0] * self.size
        for page in references:
            expected[page] += 1
        if expected != self.ref_counts:
            wrong = [page for page in range(self.size) if expected[page] != self.ref_counts[page]]
            raise RuntimeError(f"reference counts of pages {wrong[:8]} are wrong")
        if sorted(self._free) != [page for page in range(self.size) if expected[page] == 0]:
            raise RuntimeError("the free list and the reference counts disagree")
