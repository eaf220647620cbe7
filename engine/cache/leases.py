"""Leases: pin the pages that a job used until the job is done with them.

A pin affects speed, never correctness. It is not a reference but a class of eviction: a pinned page is evicted when no
other unused page is left. Memory that is only pinned therefore counts as available, and pins can never keep a sequence
from running. Several leases may pin the same page.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence

from engine.cache.radix_tree import Lease, Node, RadixTree

MAX_LEASES = 4096
"""Leases that may pin pages at the same time. Beyond it the least recently used one loses its pins."""

_UNPIN_BATCHES = 16
"""Pins are evicted by this fraction of the cap at a time, so that the search for the oldest is paid for rarely."""


class Leases:
    """Pins of all leases. ``cap``: most pinned pages; ``seconds``: time to live of a lease that is not touched."""

    def __init__(
        self, tree: RadixTree, *, cap: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tree = tree
        self._cap = cap
        self._seconds = seconds
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        """Leases that pin a page, least recently touched first."""

    def __len__(self) -> int:
        return len(self._leases)

    def touch(self, name: str) -> None:
        """Renew the time to live of a lease."""
        lease = self._leases.pop(name, None)
        if lease is not None:
            lease.touched = self._clock()
            self._leases[name] = lease

    def pin(self, name: str, namespace: str | None, end: Node) -> None:
        """Pin a page that a sequence of the lease has just released, and all pages before it.

        Beyond the cap the least recently used lease loses its oldest pins.
        """
        self.touch(name)
        lease = self._leases.setdefault(name, Lease(name, self._clock()))
        lease.namespaces.add(namespace)
        node = end
        while node.parent is not None and lease not in node.pins:
            self._tree.pin(node, lease)
            node = node.parent
        while self._tree.num_pinned > self._cap or len(self._leases) > MAX_LEASES:
            self.evict_oldest_pins()

    def evict_oldest_pins(self) -> bool:
        """Unpin the oldest pages of the least recently used lease; return ``False`` if nothing is pinned."""
        if not self._leases:
            return False
        lease = next(iter(self._leases.values()))
        for node in _oldest_nodes(lease, max(1, self._cap // _UNPIN_BATCHES)):
            self._unpin(lease, node)
        return True

    def expire(self) -> None:
        """Release the leases whose time to live has passed."""
        oldest = self._clock() - self._seconds
        while self._leases:
            lease = next(iter(self._leases.values()))
            if lease.touched > oldest:
                break
            self.release(lease.name)

    def release(self, name: str) -> None:
        """Unpin all pages of a lease. An unknown lease is no error: its pins may have been evicted."""
        lease = self._leases.get(name)
        if lease is not None:
            for node in list(lease.nodes):
                self._unpin(lease, node)

    def prune(self, name: str, tokens: Sequence[int]) -> None:
        """Unpin a branch, given by all its tokens, back to where another pinned branch of the lease leaves it.

        Pages of it that nothing else pins or uses are evicted first.
        """
        lease = self._leases.get(name)
        if lease is not None:
            for namespace in lease.namespaces:
                self._prune(lease, namespace, tokens)

    def unpin(self, node: Node) -> None:
        """Unpin a page of all leases. The caller also unpins the pages after it."""
        for lease in list(node.pins):
            self._unpin(lease, node)

    def clear(self) -> None:
        for name in list(self._leases):
            self.release(name)

    def check(self) -> None:
        """Raise ``RuntimeError`` unless leases and pages agree on the pins, and the cap holds."""
        pins = {(name, node.page) for name, lease in self._leases.items() for node in lease.nodes}
        if pins != {(lease.name, node.page) for node in self._tree.walk() for lease in node.pins}:
            raise RuntimeError("leases and pages do not agree on what is pinned")
        if any(not lease.nodes or lease.name != name for name, lease in self._leases.items()):
            raise RuntimeError("a lease that pins nothing, or is stored under another name, was kept")
        touched = [lease.touched for lease in self._leases.values()]
        if touched != sorted(touched):
            raise RuntimeError("the leases are not in the order of their use")
        if self._tree.num_pinned > self._cap:
            raise RuntimeError(f"{self._tree.num_pinned} pages are pinned; the cap is {self._cap}")

    def _prune(self, lease: Lease, namespace: str | None, tokens: Sequence[int]) -> None:
        path = self._tree.match(namespace, tokens, len(tokens)).nodes
        last = path[-1] if path else self._tree.root(namespace)
        rest = tuple(tokens[len(path) * self._tree.page_size :])
        for length in range(1, min(len(rest) + 1, self._tree.page_size)):
            partial = last.children.get(rest[:length])
            if partial is not None and lease in partial.pins:
                self._unpin(lease, partial)
                self._tree.mark_evict_first(partial)
        for node in reversed(path):
            if lease not in node.pins or any(lease in child.pins for child in node.children.values()):
                break
            self._unpin(lease, node)
            self._tree.mark_evict_first(node)

    def _unpin(self, lease: Lease, node: Node) -> None:
        self._tree.unpin(node, lease)
        if not lease.nodes:
            del self._leases[lease.name]


def _oldest_nodes(lease: Lease, count: int) -> list[Node]:
    """Return the pinned pages used longest ago, each after all pinned pages that follow it."""
    num_pinned_children = Counter(node.parent for node in lease.nodes)
    leaves = [(node.last_used, node.page) for node in lease.nodes if not num_pinned_children[node]]
    nodes = {node.page: node for node in lease.nodes}
    heapq.heapify(leaves)
    oldest: list[Node] = []
    while leaves and len(oldest) < count:
        node = nodes[heapq.heappop(leaves)[1]]
        oldest.append(node)
        parent = node.parent
        num_pinned_children[parent] -= 1
        if parent is not None and parent in lease.nodes and not num_pinned_children[parent]:
            heapq.heappush(leaves, (parent.last_used, parent.page))
    return oldest
