"""Reference-counted pages of the key-value pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush


class PagePool:
    """Which of ``size`` pages are free, and how many holders each other page has.

    A holder is a sequence whose page table lists the page, or the prefix tree. A page returns to the free list when its
    last holder lets go, never sooner, so nobody can read a page that was given away.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.holders = [0] * size
        # A heap: branches that grow side by side take their pages at the same time, and read them one after the other,
        # which goes faster the closer together these lie.
        self._free = list(range(size))
        self.touched = 0
        """Pages before this one were taken at some time."""

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int | None:
        """The first free page, held once by the caller; ``None`` when there is none."""
        if not self._free:
            return None
        page = heappop(self._free)
        self.holders[page] = 1
        self.touched = max(self.touched, page + 1)
        return page

    def hold(self, pages: Sequence[int]) -> list[int]:
        """Adds a holder to each of some pages, which have one. Returns how many each has now."""
        holders = self.holders
        for page in pages:
            if holders[page] < 1:
                raise RuntimeError(f"page {page} is free and cannot be held")
            holders[page] += 1
        return [holders[page] for page in pages]

    def release(self, pages: Sequence[int]) -> list[int]:
        """Removes a holder from each of some pages. Returns how many remain; at zero a page is free."""
        holders = self.holders
        for page in pages:
            if holders[page] < 1:
                raise RuntimeError(f"page {page} is free and cannot be released")
            holders[page] -= 1
            if holders[page] == 0:
                heappush(self._free, page)
        return [holders[page] for page in pages]

    def check(self, expected: Iterable[int]) -> None:
        """Raises ``RuntimeError`` unless the holders are exactly ``expected`` (a page as often as it is held)."""
        counts = [0] * self.size
        for page in expected:
            counts[page] += 1
        if counts != self.holders:
            wrong = [page for page in range(self.size) if counts[page] != self.holders[page]]
            raise RuntimeError(f"holder counts of pages {wrong[:8]} are wrong")
        if sorted(self._free) != [page for page in range(self.size) if counts[page] == 0]:
            raise RuntimeError("the free list and the holder counts disagree")
