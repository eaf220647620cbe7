"""Page tables of ended branches that lost pages, kept for requests that go on with these branches.

What such a branch computes is no prefix that the radix tree may share. Its table is therefore retained as a whole,
under the pin key of its request, and found again by its tokens and the rule of its drops. Like pins, retained tables
affect speed alone: they are given up for lack of memory, beyond a cap, when their key is not used for a time, or with
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from engine.cache.page_drops import PageDrops
from engine.cache.page_table import PageTable
from engine.cache.radix_tree import RadixTree


@dataclass(frozen=True, slots=True, eq=False)
class RetainedTable:
    """The closed page table of one branch, with a reference to each of its pages."""

    key: str
    """The pin key of its request."""
    scope: Hashable
    """The conditions of its keys besides its tokens, such as the namespace and the rule of its drops."""
    tokens: Sequence[int]
    """The tokens that are computed, as the cache knows them; the last page of the table may be partial."""
    table: PageTable
    drops: PageDrops
    num_private: int
    """Pages that are not in the tree."""


class RetainedTables:
    """Retained tables, the oldest first. ``cap``: most pages that are not in the tree; ``seconds``: time to live of
    the tables of a key that is not touched."""

    def __init__(self, tree: RadixTree, *, cap: int, seconds: float, clock: Callable[[], float]) -> None:
        self._tree, self._cap, self._seconds, self._clock = tree, cap, seconds, clock
        self._tables: dict[RetainedTable, None] = {}
        self._touched: dict[str, float] = {}
        """Times of the last use of keys that have tables, in seconds, the longest ago first."""
        self._num_pages = 0

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, table: PageTable, tokens: Sequence[int], drops: PageDrops, *, key: str, scope: Hashable) -> None:
        """Retain a closed table, with its references; beyond the cap the oldest ones are given up."""
        num_private = sum(page not in self._tree.nodes for page in table.pages)
        retained = RetainedTable(key, scope, list(tokens), table=table, drops=drops, num_private=num_private)
        self._tables[retained] = None
        self._num_pages += num_private
        self._touched.setdefault(key, 0.0)
        self.touch(key)
        while self._num_pages > self._cap:
            self.evict_oldest()

    def find(self, scope: Hashable, tokens: Sequence[int], limit: int) -> RetainedTable | None:
        """Return the longest table of at most ``limit`` tokens that some tokens go on with."""
        found: RetainedTable | None = None
        for table in self._tables:
            length = len(table.tokens)
            is_longer = length <= limit and (found is None or length > len(found.tokens))
            # Siblings differ in their last tokens more often than in the first.
            if is_longer and table.scope == scope and table.tokens[-1] == tokens[length - 1]:
                found = table if table.tokens == tokens[:length] else found
        return found

    def acquire(self, retained: RetainedTable) -> None:
        """Add a reference to each page of a table."""
        references = retained.table.references
        self._tree.acquire([page for page in references if page in self._tree.nodes])
        self._tree.pool.incref([page for page in references if page not in self._tree.nodes])

    def take(self, retained: RetainedTable) -> None:
        """Hand over the references of a table."""
        del self._tables[retained]
        self._num_pages -= retained.num_private
        if not any(table.key == retained.key for table in self._tables):
            del self._touched[retained.key]

    def evict_oldest(self) -> bool:
        """Give up the oldest table; return ``False`` if there is none."""
        if not self._tables:
            return False
        self._give_up(next(iter(self._tables)))
        return True

    def touch(self, key: str) -> None:
        """Renew the time to live of a key's tables."""
        if self._touched.pop(key, None) is not None:
            self._touched[key] = self._clock()

    def expire(self) -> None:
        """Give up the tables of the keys whose time to live has passed."""
        while self._touched:
            key, touched = next(iter(self._touched.items()))
            if touched > self._clock() - self._seconds:
                break
            self.release(key)

    def release(self, key: str) -> None:
        """Give up the tables of a key."""
        for table in [table for table in self._tables if table.key == key]:
            self._give_up(table)

    def prune(self, key: str, tokens: Sequence[int]) -> None:
        """Give up the tables of a branch that another branch of the key does not go on with, given all its tokens."""
        own = [table for table in self._tables if table.key == key]
        for table in sorted(own, key=lambda one: -len(one.tokens)):
            length = len(table.tokens)
            if table.tokens == list(tokens[:length]) and not any(
                other.tokens[:length] == table.tokens for other in own if other is not table and other in self._tables
            ):
                self._give_up(table)

    def clear(self) -> None:
        while self.evict_oldest():
            pass

    def count_evictable(self, used: Collection[int] = ()) -> int:
        """Return the number of pages that nobody else refers to but the tree, without those that are ``used``."""
        counts, nodes = self._tree.pool.ref_counts, self._tree.nodes
        held = Counter(self.list_references())
        return sum(counts[page] == count + (page in nodes) for page, count in held.items() if page not in used)

    def list_references(self) -> list[int]:
        """Return every page as often as tables refer to it."""
        return [page for retained in self._tables for page in retained.table.references]

    def _give_up(self, retained: RetainedTable) -> None:
        self.take(retained)
        self._tree.release(retained.table.references)
