"""The prefix tree: pages of committed tokens that later sequences can share.

A node is one page. A full page is keyed by its tuple of tokens under the page before it, so finding a shared prefix is
one dictionary look-up per page. A leaf may be a partial page: its first tokens can be copied, which makes a hit exact
to the token. Keys are the tokens themselves, not hashes of them: two prefixes can never be confused.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.cache.pool import PagePool

Key = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """One cached page. ``key`` holds the tokens in it, at most a page; only full pages have children."""

    key: Key
    page: int
    parent: Node | None
    children: dict[Key, Node] = field(default_factory=dict)
    used: int = 0
    """When a sequence last let go of it, on the tree's own clock."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: full pages in order, then the first ``tail_tokens`` tokens of ``tail``."""

    nodes: list[Node]
    tail: Node | None
    tail_tokens: int


class PrefixTree:
    """Shares pages between sequences and gives up the least recently used ones when memory is needed.

    The tree is one holder of each of its pages. A page that nobody else holds is *idle*; an idle leaf may be evicted. A
    sequence that holds a page also holds every page before it, so idle pages can always be freed from the leaves
    upwards.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.root = Node((), -1, None)
        self.nodes: dict[int, Node] = {}
        self.idle = 0
        """Pages that only the tree holds: all of them can be freed."""
        self._clock = 0
        # Idle leaves by age. Entries are never removed early, only recognised as outdated when they come up.
        self._leaves: list[tuple[int, int]] = []

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of at most ``limit`` tokens. Changes nothing."""
        size, node, nodes, start = self.page_size, self.root, [], 0
        while start + size <= limit:
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            nodes.append(child)
            node, start = child, start + size
        rest = tuple(tokens[start : min(start + size, limit)])
        tail, longest = None, 0
        for key, child in node.children.items():
            if key[: longest + 1] == rest[: longest + 1] and longest < len(rest):
                longest = _common_prefix(key, rest)
                tail = child
        return Match(nodes, tail, longest)

    def insert(self, parent: Node, key: Key, page: int) -> Node:
        """Adds a page that the caller holds. ``key`` must not be there yet."""
        if key in parent.children:
            raise RuntimeError("the page is already in the tree")
        node = Node(key, page, parent)
        parent.children[key] = self.nodes[page] = node
        self.pool.hold(page)
        self._drop_shorter(node)
        return node

    def grow(self, node: Node, key: Key) -> None:
        """A partial page received more tokens. The longer ``key`` must not be there yet."""
        parent = _parent(node)
        if key in parent.children or key[: len(node.key)] != node.key:
            raise RuntimeError("the page cannot grow into this key")
        del parent.children[node.key]
        node.key = key
        parent.children[key] = node
        self._drop_shorter(node)

    def remove(self, node: Node) -> None:
        """Takes a leaf out of the tree and releases its page."""
        parent = _parent(node)
        if self.pool.holders[node.page] == 1:
            self.idle -= 1
        del parent.children[node.key], self.nodes[node.page]
        self.pool.release(node.page)
        self._offer(parent)

    def hold(self, node: Node) -> None:
        """A sequence starts to use a cached page."""
        if self.pool.holders[node.page] == 1:
            self.idle -= 1
        self.pool.hold(node.page)

    def release(self, page: int) -> None:
        """A sequence lets go of a page, cached or its own."""
        remaining = self.pool.release(page)
        node = self.nodes.get(page)
        if node is None:
            return
        self._clock += 1
        node.used = self._clock
        if remaining == 1:
            self.idle += 1
            self._offer(node)

    def evict(self) -> bool:
        """Frees the idle leaf that was used longest ago; ``False`` when there is none."""
        while self._leaves:
            used, page = heapq.heappop(self._leaves)
            node = self.nodes.get(page)
            if node is not None and node.used == used and self._evictable(node):
                self.remove(node)
                return True
        return False

    def walk(self) -> Iterator[Node]:
        """Every node below the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node is not self.root:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raises ``RuntimeError`` when the tree contradicts itself or the pool."""
        found = list(self.walk())
        for node in found:
            parent = _parent(node)
            full = parent is self.root or len(parent.key) == self.page_size
            linked = parent.children.get(node.key) is node and self.nodes.get(node.page) is node
            if not (full and linked and 0 < len(node.key) <= self.page_size):
                raise RuntimeError(f"node of page {node.page} is not linked as its key says")
            idle = self.pool.holders[node.page] == 1
            if idle and any(self.pool.holders[child.page] > 1 for child in node.children.values()):
                raise RuntimeError(f"page {node.page} is idle although a page after it is in use")
        if len(found) != len(self.nodes):
            raise RuntimeError("some cached pages cannot be reached from the root")
        if self.idle != sum(self.pool.holders[node.page] == 1 for node in found):
            raise RuntimeError("the count of idle pages is wrong")
        offered = set(self._leaves)
        if any(self._evictable(node) and (node.used, node.page) not in offered for node in found):
            raise RuntimeError("an idle leaf was never offered for eviction")

    def _evictable(self, node: Node) -> bool:
        return node is not self.root and not node.children and self.pool.holders[node.page] == 1

    def _offer(self, node: Node) -> None:
        """Remembers a node for eviction if it is an idle leaf."""
        if not self._evictable(node):
            return
        heapq.heappush(self._leaves, (node.used, node.page))
        if len(self._leaves) > 2 * len(self.nodes) + 64:
            self._leaves = [(leaf.used, page) for page, leaf in self.nodes.items() if self._evictable(leaf)]
            heapq.heapify(self._leaves)

    def _drop_shorter(self, node: Node) -> None:
        """Removes idle partial pages that say nothing that ``node`` does not say too."""
        siblings = _parent(node).children.values()
        shorter = [other for other in siblings if len(other.key) < len(node.key) and self._evictable(other)]
        for other in shorter:
            if node.key[: len(other.key)] == other.key:
                self.remove(other)


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise RuntimeError("the root has no page")
    return node.parent


def _common_prefix(left: Key, right: Key) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
