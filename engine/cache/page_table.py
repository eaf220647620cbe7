"""The pages of one running sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.cache.radix_tree import Key, Node
from engine.cache.states import SequenceState


@dataclass(eq=False, slots=True)
class PageTable:
    """Pages of one running sequence, in token order."""

    row: int
    """Row of ``KVCache.page_table`` that mirrors ``pages`` for the kernels."""
    pages: list[int]
    """Pages that are read, without those that were dropped."""
    namespace: str | None
    """Namespace of the radix tree that the pages are published in."""
    last_node: Node | None
    """Node of the last full page that is in the tree."""
    num_shared_pages: int
    """Number of leading pages that are in the tree."""
    num_cached_tokens: int
    """Tokens whose keys and values were cached when the table was opened."""
    partial_node: Node | None = None
    """Node of the partial page after the shared ones, if this sequence published it. Only this sequence extends it."""
    state: SequenceState | None = None
    """The states of layers that have no keys, if the model has such layers."""
    num_dropped_pages: int = 0
    """Pages before the last ones that were dropped, so that the tokens after them are not published."""
    held_pages: list[int] = field(default_factory=list)
    """Dropped pages that are in the tree, where pages after them are in use."""

    @property
    def references(self) -> list[int]:
        """Pages that it refers to, in the order in which they are released: from the end, so that of those that are
        released together the later ones are evicted first."""
        return [*reversed(self.pages), *self.held_pages]

    @property
    def num_pages(self) -> int:
        """Pages of the sequence's tokens, dropped ones included."""
        return len(self.pages) + self.num_dropped_pages


@dataclass(frozen=True, slots=True)
class RestoredPage:
    """A page that comes back from a lower tier."""

    start: int
    """Number of tokens before it."""
    key: Key
    write: Callable[[int], None]
    """Writes its keys and values into a page of the cache."""
