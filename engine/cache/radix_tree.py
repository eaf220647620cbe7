"""Radix tree over the pages of committed tokens, which later sequences can share.

```
root(namespace) ── (1 2 3 4) ──┬── (5 6 7 8) ──── (9)          a node is one page, keyed by its tokens;
                     page 7    │     page 2      page 9        a leaf may be a partial page
                               └── (5 6 0 3)
                                     page 4
```

A full page is keyed by its tuple of tokens under the page before it, so matching a prefix is one dictionary look-up per
page, and no node ever has to be split: two prefixes part between two nodes. The first tokens of a page can be copied,
which makes a match exact to the token. Keys are the tokens themselves, not hashes, so two prefixes can never be
confused. Each namespace has a root of its own and shares nothing with others; all pages come from one pool.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.cache.pages import PagePool
from engine.cache.state_layers import NO_STATE

Key = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """One cached page. Only full pages have children."""

    key: Key
    """The tokens in the page, at most a page full."""
    page: int
    parent: Node | None
    children: dict[Key, Node] = field(default_factory=dict)
    sorted_keys: list[Key] = field(default_factory=list)
    """Keys of ``children`` in order: the longest common prefix with other tokens is that of a neighbour."""
    pins: set[PinSet] = field(default_factory=set)
    """Pin sets that hold the page. They also pin every page before it."""
    last_used: int = 0
    """Time on the tree's clock when a sequence last released the page; 0: evict it first."""
    namespace: str | None = None
    snapshots: dict[int, int] = field(default_factory=dict)
    """Slots of the states after the first tokens of the page, by their number; see ``engine.cache.states``."""
    claims: set[str] | None = None
    """Keys that pinned the page until memory ran short, and sequences that were preempted; see ``Pins.claim``."""
    digest: bytes = b""
    """Digest of all tokens up to the end of a full page, once a lower tier has asked for it."""


class Snapshots(Protocol):
    """The states that are kept at pages of a tree."""

    def move(self, node: Node, by: Node) -> None:
        """Move the snapshots of a page to another one that begins with its tokens."""
        ...

    def drop(self, node: Node) -> None:
        """Drop the snapshots of a page."""
        ...


class LowerTier(Protocol):
    """Slower memory that takes what the cache gives up, see ``engine.offloading``."""

    def store_page(self, node: Node, claims: Collection[str]) -> None:
        """Copy a page that is about to be evicted, and its snapshots, for the keys that claim it."""
        ...

    def store_state(self, node: Node, offset: int, claims: Collection[str]) -> None:
        """Copy the snapshot after the first ``offset`` tokens of a page, which is about to be dropped."""
        ...

    def release(self, key: str) -> None:
        """Forget what no other key claims."""
        ...

    def prune(self, key: str, namespace: str | None, tokens: Sequence[int]) -> None:
        """Forget a key's claims on a branch, given by all its tokens, back to where another branch leaves it."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...

    def check(self) -> None:
        """Raise ``RuntimeError`` if the tier is inconsistent."""
        ...


@dataclass(eq=False, slots=True)
class PinSet:
    """The pages that stay cached under one key; see ``engine.cache.pins``."""

    key: str
    touched: float
    """Time of the last use in seconds, on the clock of ``Pins``."""
    nodes: dict[Node, int] = field(default_factory=dict)
    """The pages, and how many tokens of each were pinned: others that begin with them may take their place."""
    namespaces: set[str | None] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Match:
    """Longest cached prefix of some tokens: full pages in order, then the first tokens of one more page."""

    nodes: list[Node] = field(default_factory=list)
    partial_page: Node | None = None
    """The page whose first ``num_partial_tokens`` tokens match."""
    num_partial_tokens: int = 0
    num_tokens: int = 0
    version: int = -1
    """Version of the tree that was searched."""
    snapshot: int = NO_STATE
    """Slot of the state after ``num_tokens`` tokens, if the model has states."""
    untrimmed: list[Node] | None = None
    """The full pages that match, if ``nodes`` ends earlier, at a snapshot."""

    @property
    def path(self) -> list[Node]:
        """All full pages that match, whether or not there is a state to go on from."""
        return self.nodes if self.untrimmed is None else self.untrimmed

    def trim_to_snapshot(self, page_size: int) -> Match:
        """Return the longest prefix of the match that ends at a snapshot."""
        ends = [*((node, page_size) for node in self.nodes)]
        if self.partial_page is not None:
            ends.append((self.partial_page, self.num_partial_tokens))
        for index in reversed(range(len(ends))):
            node, num_tokens = ends[index]
            offset = max((end for end in node.snapshots if end <= num_tokens), default=0)
            if offset:
                is_full = offset == page_size
                return Match(
                    nodes=self.nodes[: index + is_full],
                    partial_page=None if is_full else node,
                    num_partial_tokens=0 if is_full else offset,
                    num_tokens=index * page_size + offset,
                    version=self.version,
                    snapshot=node.snapshots[offset],
                    untrimmed=self.nodes,
                )
        return Match(version=self.version, untrimmed=self.nodes)


class RadixTree:
    """Shares pages between sequences and evicts the least recently used ones when memory is needed.

    The tree holds one reference to each of its pages. A page without other references is *unused*; an unused leaf may
    be evicted unless it is pinned. A sequence that references a page also references every page before it, so unused
    pages can always be freed from the leaves upwards.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.roots: dict[str | None, Node] = {}
        """Roots that have a page, by namespace."""
        self.nodes: dict[int, Node] = {}
        """Cached pages by page number."""
        self.num_evictable = 0
        """Pages that only the tree references, pinned ones and inner nodes included."""
        self.num_pinned = 0
        """Pages that are pinned, in use or not."""
        self.version = 0
        """Number of changes so far that may lengthen or shorten a match."""
        self.snapshots: Snapshots | None = None
        self.on_evict: Callable[[Node], None] | None = None
        """Receiver of each page that is about to be evicted for lack of memory."""
        self._clock = 0
        # Unused, unpinned leaves by age. Entries are not removed when they become outdated, but skipped when popped.
        self._eviction_queue: list[tuple[int, int]] = []

    def match(
        self, namespace: str | None, tokens: Sequence[int], limit: int, previous_match: Match | None = None
    ) -> Match:
        """Return the longest cached prefix of at most ``limit`` tokens.

        ``previous_match``: an earlier result for the same arguments, updated in place. The pages of it that are still
        cached are not looked up again.
        """
        size, match = self.page_size, previous_match or Match()
        if match.version == self.version:
            return match
        nodes = match.nodes
        while nodes and self.nodes.get(nodes[-1].page) is not nodes[-1]:
            nodes.pop()
        start = len(nodes) * size
        match.version, match.partial_page, match.num_partial_tokens, match.num_tokens = self.version, None, 0, start
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
        index = bisect_left(node.sorted_keys, rest)
        for key in node.sorted_keys[max(index - 1, 0) : index + 1]:
            length = _common_prefix_length(key, rest)
            if length > match.num_partial_tokens:
                match.partial_page, match.num_partial_tokens = node.children[key], length
        match.num_tokens = start + match.num_partial_tokens
        return match

    def root(self, namespace: str | None) -> Node:
        """Return the root to insert the first page of a namespace under."""
        return self.roots.get(namespace) or Node((), -1, None, namespace=namespace)

    def find_extension(self, parent: Node, key: Key) -> Node | None:
        """Return a child of ``parent`` whose tokens begin with ``key``, preferably with more tokens."""
        index = bisect_left(parent.sorted_keys, key)
        found = [other for other in parent.sorted_keys[index : index + 2] if other[: len(key)] == key]
        return parent.children[found[-1]] if found else None

    def insert(self, parent: Node, key: Key, page: int) -> Node:
        """Add a page that the caller references. ``key`` must not be cached yet."""
        if key in parent.children:
            raise RuntimeError("the page is already in the tree")
        if parent.parent is None:
            self.roots[parent.namespace] = parent
        node = Node(key, page, parent)
        self.nodes[page] = node
        self.pool.incref([page])
        self._link(parent, node)
        return node

    def extend(self, node: Node, key: Key) -> None:
        """Replace the key of a partial page that received more tokens. The longer ``key`` must not be cached yet."""
        parent = _get_parent(node)
        if key in parent.children or key[: len(node.key)] != node.key:
            raise RuntimeError("the page cannot be extended to this key")
        self._unlink(parent, node)
        node.key = key
        self._link(parent, node)

    def replace(self, node: Node, by: Node) -> None:
        """Remove a leaf whose tokens another page has too, and move its pins and snapshots to that page."""
        for pin_set in list(node.pins):
            num_tokens = pin_set.nodes[node]
            self.unpin(node, pin_set)
            self.pin(by, pin_set, num_tokens)
        if node.claims:
            by.claims = node.claims | (by.claims or set())
        if self.snapshots is not None:
            self.snapshots.move(node, by)
        self.remove(node)

    def remove(self, node: Node) -> None:
        """Remove an unpinned leaf and release its page."""
        if node.pins or node.children:
            raise RuntimeError(f"page {node.page} is pinned or has pages after it")
        parent = _get_parent(node)
        if self.snapshots is not None:
            self.snapshots.drop(node)
        if self.pool.ref_counts[node.page] == 1:
            self.num_evictable -= 1
        self._unlink(parent, node)
        del self.nodes[node.page]
        self.pool.decref([node.page])
        if parent.parent is not None:
            self._enqueue_if_evictable(parent)
        elif not parent.children:
            del self.roots[parent.namespace]

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a sequence's reference to cached pages."""
        self.num_evictable -= self.pool.incref(pages).count(2)

    def release(self, pages: Sequence[int]) -> None:
        """Remove a sequence's reference from pages, cached or private, in the order in which they may be evicted.

        An unused partial page is dropped if another page has its tokens, too.
        """
        nodes, clock = self.nodes, self._clock
        for page, ref_count in zip(pages, self.pool.decref(pages), strict=True):
            node = nodes.get(page)
            if node is None:
                continue
            clock += 1
            node.last_used = clock
            if ref_count == 1:
                self.num_evictable += 1
                if not node.children:  # most have some
                    self._drop_or_enqueue(node)
        self._clock = clock

    def pin(self, node: Node, pin_set: PinSet, num_tokens: int) -> None:
        """Pin the first tokens of a page. The caller also pins the pages before it."""
        if not node.pins:
            self.num_pinned += 1
        node.pins.add(pin_set)
        pin_set.nodes[node] = max(num_tokens, pin_set.nodes.get(node, 0))

    def unpin(self, node: Node, pin_set: PinSet) -> None:
        """Undo ``pin``. The caller also unpins the pages after it."""
        node.pins.remove(pin_set)
        del pin_set.nodes[node]
        if not node.pins:
            self.num_pinned -= 1
            self._enqueue_if_evictable(node)

    def mark_evict_first(self, node: Node) -> None:
        """Put a page first in the eviction queue if it is unused, unpinned, and all pages after it are marked."""
        if node.pins or self.pool.ref_counts[node.page] > 1:
            return
        if any(child.last_used for child in node.children.values()):
            return
        node.last_used = 0
        self._enqueue_if_evictable(node)

    def evict(self) -> bool:
        """Free the least recently used leaf that is unused and unpinned; return ``False`` if there is none."""
        while self._eviction_queue:
            last_used, page = heapq.heappop(self._eviction_queue)
            node = self.nodes.get(page)
            if node is not None and node.last_used == last_used and self._is_evictable(node):
                if self.on_evict is not None:
                    self.on_evict(node)
                self.remove(node)
                return True
        return False

    def walk(self) -> Iterator[Node]:
        """Yield every page of the tree, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise ``RuntimeError`` if the tree is inconsistent with itself or with the pool."""
        if not all(root.children and root.namespace == name for name, root in self.roots.items()):
            raise RuntimeError("a namespace without a page, or under another name, was kept")
        nodes = list(self.walk())
        for node in nodes:
            self._check_node(node)
        if len(nodes) != len(self.nodes):
            raise RuntimeError("some cached pages cannot be reached from a root")
        if self.num_evictable != sum(self.pool.ref_counts[node.page] == 1 for node in nodes):
            raise RuntimeError("the count of evictable pages is wrong")
        if self.num_pinned != sum(bool(node.pins) for node in nodes):
            raise RuntimeError("the count of pinned pages is wrong")
        queue = set(self._eviction_queue)
        if any(self._is_evictable(node) and (node.last_used, node.page) not in queue for node in nodes):
            raise RuntimeError("an evictable leaf is missing in the eviction queue")

    def _check_node(self, node: Node) -> None:
        parent = _get_parent(node)
        is_full = parent.parent is None or len(parent.key) == self.page_size
        is_linked = parent.children.get(node.key) is node and self.nodes.get(node.page) is node
        has_valid_keys = 0 < len(node.key) <= self.page_size and node.sorted_keys == sorted(node.children)
        if self.pool.ref_counts[node.page] == 1 and self.find_extension(parent, node.key) is not node:
            raise RuntimeError(f"page {node.page} is unused, and another page begins with its tokens")
        if not (is_full and is_linked and has_valid_keys):
            raise RuntimeError(f"the node of page {node.page} is not linked as its key says")
        if parent.parent is not None:
            if self.pool.ref_counts[parent.page] == 1 < self.pool.ref_counts[node.page]:
                raise RuntimeError(f"page {parent.page} is unused although a page after it is in use")
            if not node.pins <= parent.pins:
                raise RuntimeError(f"page {parent.page} is not pinned although a page after it is")

    def _is_evictable(self, node: Node) -> bool:
        """Return True if the node can be evicted now: an unused, unpinned leaf."""
        return not node.children and not node.pins and self.pool.ref_counts[node.page] == 1

    def _drop_or_enqueue(self, leaf: Node) -> None:
        """Drop an unused partial page whose tokens another page begins with; any other may be evicted."""
        if len(leaf.key) < self.page_size:
            longer = self.find_extension(_get_parent(leaf), leaf.key)
            if longer is not None and longer is not leaf:
                self.replace(leaf, longer)
                return
        self._enqueue_if_evictable(leaf)

    def _enqueue_if_evictable(self, node: Node) -> None:
        if not self._is_evictable(node):
            return
        heapq.heappush(self._eviction_queue, (node.last_used, node.page))
        if len(self._eviction_queue) > 2 * len(self.nodes) + 64:  # most entries are outdated
            self._eviction_queue = [
                (leaf.last_used, page) for page, leaf in self.nodes.items() if self._is_evictable(leaf)
            ]
            heapq.heapify(self._eviction_queue)

    def _link(self, parent: Node, node: Node) -> None:
        """Add a child, and drop unused partial pages whose tokens it begins with."""
        self.version += 1
        key, keys = node.key, parent.sorted_keys
        index = bisect_left(keys, key)
        # Every key between a prefix of ``key`` and ``key`` begins with that prefix, so the key before it bounds the
        # length of the prefixes that are cached.
        common = _common_prefix_length(keys[index - 1], key) if index else 0
        parent.children[key] = node
        keys.insert(index, key)
        for length in range(1, min(common + 1, len(key))):
            shorter = parent.children.get(key[:length])
            if shorter is not None and self.pool.ref_counts[shorter.page] == 1:
                self.replace(shorter, node)

    def _unlink(self, parent: Node, node: Node) -> None:
        self.version += 1
        del parent.children[node.key]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, node.key)]


def _get_parent(node: Node) -> Node:
    if node.parent is None:
        raise RuntimeError("the root has no page")
    return node.parent


def _common_prefix_length(left: Key, right: Key) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
