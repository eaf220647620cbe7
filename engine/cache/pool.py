"""Reference-counted pages of the key-value pool."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Which of ``size`` pages are free, and how many holders each other page has.

    A holder is a sequence whose page table lists the page, or the prefix tree. A page returns to the free list when its
    last holder lets go, never sooner, so nobody can read a page that was given away.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.holders = [0] * size
        # A stack: the page that was freed last is the one most likely still in the processor's cache.
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int | None:
        """A free page, held once by the caller; ``None`` when there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Adds a holder to a page that has one."""
        if self.holders[page] < 1:
            raise RuntimeError(f"page {page} is free and cannot be held")
        self.holders[page] += 1

    def release(self, page: int) -> int:
        """Removes a holder and returns how many remain; at zero the page is free."""
        if self.holders[page] < 1:
            raise RuntimeError(f"page {page} is free and cannot be released")
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self._free.append(page)
        return self.holders[page]

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
