"""Pins: keep the pages that a job used until the job is done with them.

A pin affects speed, never correctness. It is not a reference but a class of eviction: a pinned page is evicted when no
other unused page is left. Memory that is only pinned therefore counts as available, and pins can never keep a sequence
from running. A page may be pinned under several keys.

A key whose pins were evicted or have expired keeps a *claim* on these pages until it is released: when they are
evicted, a lower tier takes them, if there is one.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.cache.radix_tree import LowerTier, Node, PinSet, RadixTree

MAX_PIN_SETS = 4096
"""Keys under which pages may be pinned at the same time. Beyond it the least recently used one loses its pins."""

MAX_CLAIMS = 1 << 16
"""Keys with claims. Beyond it the oldest one loses them."""

_UNPIN_BATCHES = 16
"""Pins are evicted by this fraction of the cap at a time, so that the search for the oldest is paid for rarely."""


class Pins:
    """Pinned pages by key. ``cap``: most pinned pages; ``seconds``: time to live of pins that are not touched."""

    def __init__(
        self, tree: RadixTree, *, cap: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lower_tier: LowerTier | None = None
        self._tree = tree
        self._cap = cap
        self._seconds = seconds
        self._clock = clock
        self._sets: dict[str, PinSet] = {}
        """Pin sets that hold a page, least recently touched first."""
        self._claims: dict[str, set[str | None]] = {}
        """Keys with claims and their namespaces, oldest first."""

    def __len__(self) -> int:
        return len(self._sets)

    def touch(self, key: str) -> None:
        """Renew the time to live of a key's pins."""
        pin_set = self._sets.pop(key, None)
        if pin_set is not None:
            pin_set.touched = self._clock()
            self._sets[key] = pin_set

    def pin(self, key: str, namespace: str | None, end: Node) -> None:
        """Pin a page that a sequence with this key has just released, and all pages before it.

        Beyond the cap the least recently used pin set loses its oldest pins.
        """
        self.touch(key)
        pin_set = self._sets.setdefault(key, PinSet(key, self._clock()))
        pin_set.namespaces.add(namespace)
        node = end
        while node.parent is not None and pin_set not in node.pins:
            self._tree.pin(node, pin_set, len(node.key))
            node = node.parent
        if end.parent is not None:
            pin_set.nodes[end] = len(end.key)  # of an earlier pin it may have been fewer
        if key in self._claims:
            self._claims[key].add(namespace)
        while self._tree.num_pinned > self._cap or len(self._sets) > MAX_PIN_SETS:
            self.evict_oldest_pins()

    def evict_oldest_pins(self) -> bool:
        """Unpin the oldest pages of the least recently used pin set; return ``False`` if nothing is pinned."""
        if not self._sets:
            return False
        pin_set = next(iter(self._sets.values()))
        for node in _oldest_nodes(pin_set, max(1, self._cap // _UNPIN_BATCHES)):
            self._lose_pin(pin_set, node)
        return True

    def expire(self) -> None:
        """Unpin the pages of the pin sets whose time to live has passed."""
        oldest = self._clock() - self._seconds
        while self._sets:
            pin_set = next(iter(self._sets.values()))
            if pin_set.touched > oldest:
                break
            for node in list(pin_set.nodes):
                self._lose_pin(pin_set, node)

    def claim(self, key: str, nodes: Iterable[Node], namespaces: Iterable[str | None] = ()) -> None:
        """Let a lower tier take these pages when they are evicted, until the key is released."""
        if self.lower_tier is None:
            return
        self._claims.setdefault(key, set()).update(namespaces)
        if len(self._claims) > MAX_CLAIMS:
            del self._claims[next(iter(self._claims))]
        for node in nodes:
            if node.claims is None:
                node.claims = set()
            node.claims.add(key)

    def find_claims(self, node: Node) -> set[str]:
        """Return the keys that claim a page, those that pin it included."""
        claims = {key for key in node.claims or () if key in self._claims}
        return claims | {pin_set.key for pin_set in node.pins}

    def release(self, key: str) -> None:
        """Unpin all pages of a key. An unknown key is no error: its pins may have been evicted."""
        self._claims.pop(key, None)
        if self.lower_tier is not None:
            self.lower_tier.release(key)
        pin_set = self._sets.get(key)
        if pin_set is not None:
            for node in list(pin_set.nodes):
                self._unpin(pin_set, node)

    def prune(self, key: str, tokens: Sequence[int]) -> None:
        """Unpin a branch, given by all its tokens, back to where another branch pinned under the key leaves it.

        Pages of it that nothing else pins or uses are evicted first.
        """
        pin_set = self._sets.get(key)
        claimed = self._claims.get(key, set())
        if pin_set is not None:
            for namespace in pin_set.namespaces:
                self._prune(pin_set, namespace, tokens)
        if self.lower_tier is not None:
            for namespace in claimed | (set() if pin_set is None else pin_set.namespaces):
                self._prune_claims(key, namespace, tokens)
                self.lower_tier.prune(key, namespace, tokens)

    def unpin(self, node: Node) -> None:
        """Unpin a page under all keys. The caller also unpins the pages after it."""
        for pin_set in list(node.pins):
            self._unpin(pin_set, node)

    def clear(self) -> None:
        self._claims.clear()
        for key in list(self._sets):
            self.release(key)

    def check(self) -> None:
        """Raise ``RuntimeError`` unless pin sets and pages agree on the pins, and the cap holds."""
        pins = {(key, node.page) for key, pin_set in self._sets.items() for node in pin_set.nodes}
        if pins != {(pin_set.key, node.page) for node in self._tree.walk() for pin_set in node.pins}:
            raise RuntimeError("pin sets and pages do not agree on what is pinned")
        if any(not pin_set.nodes or pin_set.key != key for key, pin_set in self._sets.items()):
            raise RuntimeError("a pin set without a page, or is stored under another name, was kept")
        touched = [pin_set.touched for pin_set in self._sets.values()]
        if touched != sorted(touched):
            raise RuntimeError("the pin sets are not in the order of their use")
        if self._tree.num_pinned > self._cap:
            raise RuntimeError(f"{self._tree.num_pinned} pages are pinned; the cap is {self._cap}")

    def _prune(self, pin_set: PinSet, namespace: str | None, tokens: Sequence[int]) -> None:
        path = self._tree.match(namespace, tokens, len(tokens)).nodes
        last = path[-1] if path else self._tree.root(namespace)
        rest = tuple(tokens[len(path) * self._tree.page_size :])
        for node in [node for node in last.children.values() if pin_set in node.pins]:
            length = pin_set.nodes[node]
            if node.key[:length] == rest[:length] and not _has_pinned_child(node, pin_set):
                self._unpin(pin_set, node)
                self._tree.mark_evict_first(node)
        for node in reversed(path):
            if pin_set not in node.pins or _has_pinned_child(node, pin_set):
                break
            self._unpin(pin_set, node)
            self._tree.mark_evict_first(node)

    def _prune_claims(self, key: str, namespace: str | None, tokens: Sequence[int]) -> None:
        path = self._tree.match(namespace, tokens, len(tokens)).nodes
        last = path[-1] if path else self._tree.root(namespace)
        partial = last.children.get(tuple(tokens[len(path) * self._tree.page_size :]))
        for node in reversed(path if partial is None else [*path, partial]):
            if any(_is_claimed(child, key) for child in node.children.values()):
                break
            if node.claims:
                node.claims.discard(key)

    def _lose_pin(self, pin_set: PinSet, node: Node) -> None:
        """Unpin a page for lack of memory or time, with a claim in place of the pin."""
        self.claim(pin_set.key, [node], pin_set.namespaces)
        self._unpin(pin_set, node)

    def _unpin(self, pin_set: PinSet, node: Node) -> None:
        self._tree.unpin(node, pin_set)
        if not pin_set.nodes:
            del self._sets[pin_set.key]


def _has_pinned_child(node: Node, pin_set: PinSet) -> bool:
    return any(pin_set in child.pins for child in node.children.values())


def _is_claimed(node: Node, key: str) -> bool:
    return (node.claims is not None and key in node.claims) or any(pin_set.key == key for pin_set in node.pins)


def _oldest_nodes(pin_set: PinSet, count: int) -> list[Node]:
    """Return the pinned pages used longest ago, each after all pinned pages that follow it."""
    num_pinned_children = Counter(node.parent for node in pin_set.nodes)
    leaves = [(node.last_used, node.page) for node in pin_set.nodes if not num_pinned_children[node]]
    nodes = {node.page: node for node in pin_set.nodes}
    heapq.heapify(leaves)
    oldest: list[Node] = []
    while leaves and len(oldest) < count:
        node = nodes[heapq.heappop(leaves)[1]]
        oldest.append(node)
        parent = node.parent
        num_pinned_children[parent] -= 1
        if parent is not None and parent in pin_set.nodes and not num_pinned_children[parent]:
            heapq.heappush(leaves, (parent.last_used, parent.page))
    return oldest
