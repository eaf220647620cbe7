"""Page tables of ended branches that lost pages, kept for requests that go on with these branches.

What such a branch computes is no prefix that the radix tree may share. Its table is therefore retained as a whole,
under the pin key of its request, and found again by its tokens and the rule of its drops. Like pins, retained tables
affect speed alone: they are given up for lack of memory, beyond a cap, after a time, or with their key.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from engine.cache.page_drops import PageDrops
from engine.cache.radix_tree import Node, RadixTree


@dataclass(frozen=True, slots=True, eq=False)
class RetainedTable:
    """The pages of one branch, with a reference to each."""

    key: str
    """The pin key of its request."""
    scope: Hashable
    """The conditions of its keys besides its tokens, such as the namespace and the rule of its drops."""
    tokens: Sequence[int]
    """The tokens that are computed."""
    pages: Sequence[int]
    """Pages that are read; the last one may be partial."""
    held_pages: Sequence[int]
    """Dropped pages that are in the tree, as of ``PageTable``."""
    num_dropped_pages: int
    last_node: Node | None
    num_shared_pages: int
    drops: PageDrops
    touched: float
    """Time of its end in seconds, on the clock of the cache."""

    @property
    def references(self) -> list[int]:
        """Its pages in the order in which they are released."""
        return [*reversed(self.pages), *self.held_pages]


class RetainedTables:
    """Retained tables, the oldest first. ``cap``: most pages; ``seconds``: time to live."""

    def __init__(self, tree: RadixTree, *, cap: int, seconds: float, clock: Callable[[], float]) -> None:
        self._tree, self._cap, self._seconds, self._clock = tree, cap, seconds, clock
        self._tables: deque[RetainedTable] = deque()
        self._num_pages = 0

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def now(self) -> float:
        return self._clock()

    def add(self, table: RetainedTable) -> None:
        """Retain a table, with its references; beyond the cap the oldest ones are given up."""
        self._tables.append(table)
        self._num_pages += len(table.references)
        while self._num_pages > self._cap:
            self.evict_oldest()

    def find(self, scope: Hashable, tokens: Sequence[int]) -> RetainedTable | None:
        """Return the longest table that some tokens go on with, at least by one."""
        found: RetainedTable | None = None
        for table in self._tables:
            length = len(table.tokens)
            is_longer = length < len(tokens) and (found is None or length > len(found.tokens))
            if is_longer and table.scope == scope and table.tokens == tokens[:length]:
                found = table
        return found

    def acquire(self, table: RetainedTable) -> None:
        """Add a reference to each page of a table."""
        self._tree.acquire([page for page in table.references if page in self._tree.nodes])
        self._tree.pool.incref([page for page in table.references if page not in self._tree.nodes])

    def take(self, table: RetainedTable) -> None:
        """Hand over the references of a table."""
        self._tables.remove(table)
        self._num_pages -= len(table.references)

    def evict_oldest(self) -> bool:
        """Give up the oldest table; return ``False`` if there is none."""
        if not self._tables:
            return False
        self._give_up(self._tables[0])
        return True

    def expire(self) -> None:
        """Give up the tables whose time to live has passed."""
        while self._tables and self._tables[0].touched <= self._clock() - self._seconds:
            self.evict_oldest()

    def release(self, key: str) -> None:
        """Give up the tables of a key."""
        for table in [table for table in self._tables if table.key == key]:
            self._give_up(table)

    def prune(self, key: str, tokens: Sequence[int]) -> None:
        """Give up the tables of a branch that another branch of the key does not go on with, given all its tokens."""
        own = [table for table in self._tables if table.key == key]
        for table in own:
            if table.tokens == list(tokens[: len(table.tokens)]) and not any(
                other is not table and other.tokens[: len(table.tokens)] == table.tokens for other in own
            ):
                self._give_up(table)

    def clear(self) -> None:
        while self.evict_oldest():
            pass

    def count_evictable(self) -> int:
        """Return the number of pages that are free or in the tree alone once all tables are given up."""
        counts, nodes = self._tree.pool.ref_counts, self._tree.nodes
        held = Counter(page for table in self._tables for page in table.references)
        return sum(counts[page] == count + (page in nodes) for page, count in held.items())

    def list_references(self) -> list[int]:
        """Return every page as often as tables refer to it."""
        return [page for table in self._tables for page in table.references]

    def _give_up(self, table: RetainedTable) -> None:
        self.take(table)
        self._tree.release(table.references)
