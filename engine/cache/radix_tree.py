"""The prefix tree: pages of committed tokens that later sequences can share.

A node is one page. A full page is keyed by its tuple of tokens under the page before it, so finding a shared prefix is
one dictionary look-up per page, and no node ever has to be split: two prefixes part between two nodes. A leaf may be a
partial page: its first tokens can be copied, which makes a hit exact to the token. Keys are the tokens themselves, not
hashes of them: two prefixes can never be confused.

Each namespace has a root of its own, so that nothing is shared between two of them; the pages come from one pool.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.cache.pages import PagePool

Key = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """One cached page. ``key`` holds the tokens in it, at most a page; only full pages have children."""

    key: Key
    page: int
    parent: Node | None
    children: dict[Key, Node] = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)
    """Those of ``children``, sorted: the longest common beginning with other tokens is that of a neighbour."""
    pins: set[Lease] = field(default_factory=set)
    """What pins a page also pins every page before it."""
    used: int = 0
    """When a sequence last let go of it, on the tree's own clock; 0: it may go before all others."""
    namespace: str | None = None
    """Of a root."""


@dataclass(eq=False, slots=True)
class Lease:
    """A job's claim that the pages which it touched stay cached; see ``engine.cache.leases``."""

    name: str
    touched: float
    """Seconds, on the leases' clock."""
    nodes: set[Node] = field(default_factory=set)
    """The pages that it pins."""
    namespaces: set[str | None] = field(default_factory=set)
    """Where they are."""


@dataclass(eq=False, slots=True)
class Match:
    """The longest cached prefix: full pages in order, then the first ``tail_tokens`` tokens of ``tail``."""

    nodes: list[Node] = field(default_factory=list)
    tail: Node | None = None
    tail_tokens: int = 0
    tokens: int = 0
    """How many tokens these are."""
    version: int = -1
    """The state of the tree that was looked at."""


class PrefixTree:
    """Shares pages between sequences and gives up the least recently used ones when memory is needed.

    The tree is one holder of each of its pages. A page that nobody else holds is *idle*; an idle leaf may be evicted
    unless it is pinned. A sequence that holds a page also holds every page before it, so idle pages can always be freed
    from the leaves upwards, and so can those of them that are not pinned.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.roots: dict[str | None, Node] = {}
        """By namespace; those that have a page."""
        self.nodes: dict[int, Node] = {}
        """By page."""
        self.idle = 0
        """Pages that only the tree holds, pinned ones included."""
        self.pinned = 0
        """Pages that a lease pins, in use or not."""
        self.version = 0
        """Counts the changes that may make a match longer or shorter."""
        self._clock = 0
        # Idle leaves that nobody pins, by age. Entries are never removed early, only recognised as outdated when they
        # come up.
        self._leaves: list[tuple[int, int]] = []

    def match(self, namespace: str | None, tokens: Sequence[int], limit: int, known: Match | None = None) -> Match:
        """The longest cached prefix of at most ``limit`` tokens. Changes nothing but ``known``.

        ``known`` is an earlier answer to the same question. What is still in the tree of it is not looked up again.
        """
        size, match = self.page_size, known or Match()
        if match.version == self.version:
            return match
        nodes = match.nodes
        while nodes and self.nodes.get(nodes[-1].page) is not nodes[-1]:
            nodes.pop()
        start = len(nodes) * size
        match.version, match.tail, match.tail_tokens, match.tokens = self.version, None, 0, start
        node = nodes[-1] if nodes else self.roots.get(namespace)
        if node is None:
            return match
        while start + size <= limit:
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            nodes.append(child)
            node, start = child, start + size
        rest = tuple(tokens[start : min(start + size, limit)])
        place = bisect_left(node.keys, rest)
        for key in node.keys[max(place - 1, 0) : place + 1]:
            common = _common_prefix(key, rest)
            if common > match.tail_tokens:
                match.tail, match.tail_tokens = node.children[key], common
        match.tokens = start + match.tail_tokens
        return match

    def root(self, namespace: str | None) -> Node:
        """The root to insert the first page of a namespace under."""
        return self.roots.get(namespace) or Node((), -1, None, namespace=namespace)

    def covering(self, parent: Node, key: Key) -> Node | None:
        """A page after ``parent`` that begins with ``key``."""
        place = bisect_left(parent.keys, key)
        if place < len(parent.keys) and parent.keys[place][: len(key)] == key:
            return parent.children[parent.keys[place]]
        return None

    def insert(self, parent: Node, key: Key, page: int) -> Node:
        """Adds a page that the caller holds. ``key`` must not be there yet."""
        if key in parent.children:
            raise RuntimeError("the page is already in the tree")
        if parent.parent is None:
            self.roots[parent.namespace] = parent
        node = Node(key, page, parent)
        self.nodes[page] = node
        self.pool.hold([page])
        self._link(parent, node)
        return node

    def grow(self, node: Node, key: Key) -> None:
        """A partial page received more tokens. The longer ``key`` must not be there yet."""
        parent = _parent(node)
        if key in parent.children or key[: len(node.key)] != node.key:
            raise RuntimeError("the page cannot grow into this key")
        self._unlink(parent, node)
        node.key = key
        self._link(parent, node)

    def replace(self, node: Node, by: Node) -> None:
        """Takes a leaf out whose tokens another page has too; its pins go over to that one."""
        for lease in list(node.pins):
            self.unpin(node, lease)
            self.pin(by, lease)
        self.remove(node)

    def remove(self, node: Node) -> None:
        """Takes a leaf that nobody pins out of the tree and releases its page."""
        if node.pins or node.children:
            raise RuntimeError(f"page {node.page} is pinned or has pages after it")
        parent = _parent(node)
        if self.pool.holders[node.page] == 1:
            self.idle -= 1
        self._unlink(parent, node)
        del self.nodes[node.page]
        self.pool.release([node.page])
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self.roots[parent.namespace]

    def hold(self, pages: Sequence[int]) -> None:
        """A sequence starts to use cached pages."""
        self.idle -= self.pool.hold(pages).count(2)

    def release(self, pages: Sequence[int]) -> None:
        """A sequence lets go of pages, cached or its own, in the order in which they may be evicted."""
        nodes, clock = self.nodes, self._clock
        for page, remaining in zip(pages, self.pool.release(pages), strict=True):
            node = nodes.get(page)
            if node is None:
                continue
            clock += 1
            node.used = clock
            if remaining == 1:
                self.idle += 1
                if not node.children:  # most have some
                    self._offer(node)
        self._clock = clock

    def pin(self, node: Node, lease: Lease) -> None:
        """Pins a page; the caller also pins those before it."""
        if not node.pins:
            self.pinned += 1
        node.pins.add(lease)
        lease.nodes.add(node)

    def unpin(self, node: Node, lease: Lease) -> None:
        """Undoes ``pin``; the caller has unpinned, or also unpins, the pages after it."""
        node.pins.remove(lease)
        lease.nodes.remove(node)
        if not node.pins:
            self.pinned -= 1
            self._offer(node)

    def retire(self, node: Node) -> None:
        """Puts a page first in line for eviction if it is idle, not pinned, and all pages after it are retired."""
        if node.pins or self.pool.holders[node.page] > 1 or any(child.used for child in node.children.values()):
            return
        node.used = 0
        self._offer(node)

    def evict(self) -> bool:
        """Frees the idle leaf that was used longest ago and is not pinned; ``False`` when there is none."""
        while self._leaves:
            used, page = heapq.heappop(self._leaves)
            node = self.nodes.get(page)
            if node is not None and node.used == used and self._evictable(node):
                self.remove(node)
                return True
        return False

    def walk(self) -> Iterator[Node]:
        """Every page of the tree, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raises ``RuntimeError`` when the tree contradicts itself or the pool."""
        if not all(root.children and root.namespace == name for name, root in self.roots.items()):
            raise RuntimeError("a namespace without a page, or under another name, was kept")
        found = list(self.walk())
        for node in found:
            self._check_node(node)
        if len(found) != len(self.nodes):
            raise RuntimeError("some cached pages cannot be reached from a root")
        if self.idle != sum(self.pool.holders[node.page] == 1 for node in found):
            raise RuntimeError("the count of idle pages is wrong")
        if self.pinned != sum(bool(node.pins) for node in found):
            raise RuntimeError("the count of pinned pages is wrong")
        offered = set(self._leaves)
        if any(self._evictable(node) and (node.used, node.page) not in offered for node in found):
            raise RuntimeError("an idle leaf was never offered for eviction")

    def _check_node(self, node: Node) -> None:
        parent = _parent(node)
        full = parent.parent is None or len(parent.key) == self.page_size
        linked = parent.children.get(node.key) is node and self.nodes.get(node.page) is node
        if not (full and linked and 0 < len(node.key) <= self.page_size and node.keys == sorted(node.children)):
            raise RuntimeError(f"node of page {node.page} is not linked as its key says")
        if parent.parent is not None:
            if self.pool.holders[parent.page] == 1 < self.pool.holders[node.page]:
                raise RuntimeError(f"page {parent.page} is idle although a page after it is in use")
            if not node.pins <= parent.pins:
                raise RuntimeError(f"page {parent.page} is not pinned although a page after it is")

    def _evictable(self, node: Node) -> bool:
        return not node.children and not node.pins and self.pool.holders[node.page] == 1

    def _offer(self, node: Node) -> None:
        """Remembers a node for eviction if it may be evicted."""
        if not self._evictable(node):
            return
        heapq.heappush(self._leaves, (node.used, node.page))
        if len(self._leaves) > 2 * len(self.nodes) + 64:
            self._leaves = [(leaf.used, page) for page, leaf in self.nodes.items() if self._evictable(leaf)]
            heapq.heapify(self._leaves)

    def _link(self, parent: Node, node: Node) -> None:
        """Adds a child, and drops idle partial pages that say nothing that it does not say too."""
        self.version += 1
        key, keys = node.key, parent.keys
        place = bisect_left(keys, key)
        # What lies between a key's beginning and the key begins so too: the one before it knows how long that may be.
        common = _common_prefix(keys[place - 1], key) if place else 0
        parent.children[key] = node
        keys.insert(place, key)
        for length in range(1, min(common + 1, len(key))):
            shorter = parent.children.get(key[:length])
            if shorter is not None and self.pool.holders[shorter.page] == 1:
                self.replace(shorter, node)

    def _unlink(self, parent: Node, node: Node) -> None:
        self.version += 1
        del parent.children[node.key]
        del parent.keys[bisect_left(parent.keys, node.key)]


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
