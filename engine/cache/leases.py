"""Leases: the pages that a job touched stay cached until the job is done with them.

A pin is a promise about speed, never about correctness. It is no holder of its page but a class of eviction: a pinned
page goes when no other idle page is left, so memory that is only pinned counts as available, and pins can never keep a
sequence from running. Several leases may pin the same page.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence

from engine.cache.radix_tree import Lease, Node, PrefixTree

MAX_LEASES = 4096
"""Leases that pin anything at the same time. Beyond it the least recently used one lapses."""

_BATCH = 16
"""Pins lapse by this part of the cap at a time, so that finding the oldest is paid for once in a while."""


class Leases:
    """Who pins what. ``cap``: pages that may be pinned; ``seconds``: the life of a lease that nobody touches."""

    def __init__(
        self, tree: PrefixTree, *, cap: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tree = tree
        self._cap = cap
        self._seconds = seconds
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        """Those that pin anything, least recently touched first."""

    def __len__(self) -> int:
        return len(self._leases)

    def touch(self, name: str) -> None:
        """A request names the lease: it lives on."""
        lease = self._leases.pop(name, None)
        if lease is not None:
            lease.touched = self._clock()
            self._leases[name] = lease

    def pin(self, name: str, namespace: str | None, end: Node) -> None:
        """Pins a page, and all before it, that a sequence of the lease just let go of.

        Beyond the cap the least recently used lease lets go of its oldest pages.
        """
        self.touch(name)
        lease = self._leases.setdefault(name, Lease(name, self._clock()))
        lease.namespaces.add(namespace)
        node = end
        while node.parent is not None and lease not in node.pins:
            self._tree.pin(node, lease)
            node = node.parent
        while self._tree.pinned > self._cap or len(self._leases) > MAX_LEASES:
            self.lapse()

    def lapse(self) -> bool:
        """The least recently used lease lets go of its oldest pages; ``False`` when nothing is pinned."""
        if not self._leases:
            return False
        lease = next(iter(self._leases.values()))
        for node in _oldest(lease, max(1, self._cap // _BATCH)):
            self._unpin(lease, node)
        return True

    def expire(self) -> None:
        """Ends the leases that nobody touched for too long."""
        oldest = self._clock() - self._seconds
        while self._leases:
            lease = next(iter(self._leases.values()))
            if lease.touched > oldest:
                break
            self.release(lease.name)

    def release(self, name: str) -> None:
        """Ends a lease. An unknown one is no error: it may have lapsed."""
        lease = self._leases.get(name)
        if lease is not None:
            for node in list(lease.nodes):
                self._unpin(lease, node)

    def prune(self, name: str, tokens: Sequence[int]) -> None:
        """Unpins a branch, given by all its tokens, back to where another pinned branch of the lease leaves it. What
        nobody else pins or uses of it goes first when memory is needed."""
        lease = self._leases.get(name)
        if lease is not None:
            for namespace in lease.namespaces:
                self._prune(lease, namespace, tokens)

    def clear(self) -> None:
        """Ends all leases."""
        for name in list(self._leases):
            self.release(name)

    def check(self) -> None:
        """Raises ``RuntimeError`` unless leases and pages agree on who pins what, and the cap holds."""
        pins = {(name, node.page) for name, lease in self._leases.items() for node in lease.nodes}
        if pins != {(lease.name, node.page) for node in self._tree.walk() for lease in node.pins}:
            raise RuntimeError("leases and pages do not agree on what is pinned")
        if any(not lease.nodes or lease.name != name for name, lease in self._leases.items()):
            raise RuntimeError("a lease that pins nothing, or goes by another name, was kept")
        touched = [lease.touched for lease in self._leases.values()]
        if touched != sorted(touched):
            raise RuntimeError("the leases are not in the order of their use")
        if self._tree.pinned > self._cap:
            raise RuntimeError(f"{self._tree.pinned} pages are pinned; the cap is {self._cap}")

    def _prune(self, lease: Lease, namespace: str | None, tokens: Sequence[int]) -> None:
        path = self._tree.match(namespace, tokens, len(tokens)).nodes
        last = path[-1] if path else self._tree.root(namespace)
        rest = tuple(tokens[len(path) * self._tree.page_size :])
        for length in range(1, min(len(rest) + 1, self._tree.page_size)):
            partial = last.children.get(rest[:length])
            if partial is not None and lease in partial.pins:
                self._unpin(lease, partial)
                self._tree.retire(partial)
        for node in reversed(path):
            if lease not in node.pins or any(lease in child.pins for child in node.children.values()):
                break
            self._unpin(lease, node)
            self._tree.retire(node)

    def _unpin(self, lease: Lease, node: Node) -> None:
        self._tree.unpin(node, lease)
        if not lease.nodes:
            del self._leases[lease.name]


def _oldest(lease: Lease, count: int) -> list[Node]:
    """The pages used longest ago, but none before the pinned pages after it."""
    after = Counter(node.parent for node in lease.nodes)
    leaves = [(node.used, node.page) for node in lease.nodes if not after[node]]
    nodes = {node.page: node for node in lease.nodes}
    heapq.heapify(leaves)
    oldest: list[Node] = []
    while leaves and len(oldest) < count:
        node = nodes[heapq.heappop(leaves)[1]]
        oldest.append(node)
        parent = node.parent
        after[parent] -= 1
        if parent is not None and parent in lease.nodes and not after[parent]:
            heapq.heappush(leaves, (parent.used, parent.page))
    return oldest
