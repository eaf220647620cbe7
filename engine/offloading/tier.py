"""The lower tier of a cache: takes claimed pages and states when they are evicted, and finds them for a prefix.

What came back stays here, too, so that it is not copied again when it is evicted again. The least recently used leaves
host memory for the disk, and the disk for good. Pages are evicted from the end of a branch to its beginning, so of one
branch the end goes first here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.cache.radix_tree import Match, Node
from engine.offloading.disk_store import DiskStore
from engine.offloading.host_store import HostStore
from engine.offloading.page_bytes import SlotBytes
from engine.offloading.records import (
    TOKEN_BYTES,
    DigestChain,
    Record,
    RecordIndex,
    RecordName,
    count_common,
    pack_tokens,
)
from engine.offloading.stats import OffloadingStats


@dataclass(frozen=True, slots=True)
class Part:
    """A record that continues a prefix."""

    start: int
    """Number of tokens before its page."""
    record: Record


@dataclass(frozen=True, slots=True)
class Plan:
    """The records of a lower tier that continue a cached prefix."""

    pages: Sequence[Part]
    state: Part | None
    """The state after the last token, if the model has states."""
    num_tokens: int
    """Tokens that need not be computed."""
    num_bytes: int

    @property
    def parts(self) -> list[Part]:
        return [*self.pages, *([] if self.state is None else [self.state])]


class OffloadingTier:
    """``LowerTier`` of a cache, over host memory, a disk, or both."""

    def __init__(
        self,
        cache: KVCache,
        chain: DigestChain,
        *,
        page_bytes: SlotBytes,
        state_bytes: SlotBytes | None,
        stats: OffloadingStats,
    ) -> None:
        """Create a tier without memory; ``host`` and ``disk`` are set by ``setup``."""
        self.page_bytes, self.state_bytes, self.stats = page_bytes, state_bytes, stats
        self.index = RecordIndex()
        self.host: HostStore | None = None
        self.disk: DiskStore | None = None
        self.on_clear: Callable[[], None] = lambda: None
        self._cache, self._chain = cache, chain

    # What the cache evicts.

    def store_page(self, node: Node, claims: Collection[str]) -> None:
        parent = self._find_parent_digest(node)
        name = RecordName(parent, False, pack_tokens(node.key))
        self._store(name, claims, lambda: self.page_bytes.read(node.page))
        for offset in node.snapshots:
            self._store_state(node, offset, parent, claims)

    def store_state(self, node: Node, offset: int, claims: Collection[str]) -> None:
        self._store_state(node, offset, self._find_parent_digest(node), claims)

    def release(self, key: str) -> None:
        for record in self.index.release(key):
            self.forget(record)

    def prune(self, key: str, namespace: str | None, tokens: Sequence[int]) -> None:
        size = self._cache.page_size
        path: list[tuple[bytes, bytes]] = []
        parent = self._chain.start(namespace)
        for start in range(0, len(tokens), size):
            packed = pack_tokens(tokens[start : start + size])
            path.append((parent, packed))
            parent = self._chain.extend(parent, packed)
        for parent, packed in reversed(path):
            children = self.index.list_pages(self._chain.extend(parent, packed))
            if any(key in child.claims for child in children):
                break
            states = [
                RecordName(parent, True, packed[:end]) for end in range(TOKEN_BYTES, len(packed) + 1, TOKEN_BYTES)
            ]
            for name in (RecordName(parent, False, packed), *states):
                record = self.index.get(name)
                if record is not None and self.index.unclaim(record, key):
                    self.forget(record)

    def clear(self) -> None:
        self.on_clear()
        for record in self.index:
            self.forget(record)

    def check(self) -> None:
        self.index.check()
        if self.host is not None:
            self.host.check()
        if self.disk is not None:
            self.disk.check()
        for record in self.index:
            if not record.is_stored or record.is_in_host_memory != (self.host is not None and record in self.host):
                raise RuntimeError("a record of a lower tier is nowhere")
            if not record.claims:
                raise RuntimeError("a record that nobody claims was kept")

    # What comes back.

    def find(
        self, match: Match, namespace: str | None, tokens: Sequence[int], limit: int, *, max_bytes: float
    ) -> Plan | None:
        """Return what continues a match that is up to date, up to ``limit`` tokens; ``None`` if nothing does.

        ``max_bytes``: of its records in all; more is found when these are in the cache.
        """
        if not len(self.index):
            return None
        start = len(match.path) * self._cache.page_size
        parent = self._compute_digest(match.path[-1]) if match.path else self._chain.start(namespace)
        pages, end = self._find_pages(parent, tokens, start=start, limit=limit, max_bytes=max_bytes)
        if self._cache.states is not None:
            return self._find_with_state(match, namespace, tokens, limit=limit, pages=pages, end=end)
        if end <= match.num_tokens:
            return None
        return Plan(pages, None, end - match.num_tokens, len(pages) * self.page_bytes.num_bytes)

    def touch(self, parts: Sequence[Part]) -> None:
        """Make records the last to leave, the end of the branch before its beginning."""
        for part in reversed(parts):
            self._touch(part.record)

    def forget(self, record: Record) -> None:
        """Remove a record from memory and disk."""
        if record in self.index:
            self.index.remove(record)
            if self.host is not None and record in self.host:
                self.host.drop(record)
            if self.disk is not None:
                self.disk.drop(record)

    def poll(self) -> None:
        """Note what was written meanwhile."""
        if self.disk is not None:
            self.disk.poll()
            self.stats.disk_bytes = self.disk.num_used_bytes
        if self.host is not None:
            self.stats.host_bytes = self.host.num_used_bytes

    def close(self) -> None:
        """Stop the writer, and remove all files."""
        if self.disk is not None:
            self.disk.close()

    def move_to_disk(self, record: Record) -> None:
        """Keep a record that leaves host memory on disk, if there is room; forget it else."""
        if record.group is not None:
            return
        if self.disk is None or self.host is None or not self.disk.put(record, self.host.read_on_host(record)):
            self.drop_lost(record, is_in_host_memory=False)

    def drop_lost(self, record: Record, *, is_in_host_memory: bool | None = None) -> None:
        """Forget a record that has lost its place to newer ones, unless it is in host memory, too."""
        if record.is_in_host_memory if is_in_host_memory is None else is_in_host_memory:
            return
        if record in self.index:
            self.index.remove(record)
            self.stats.pages_dropped += 1

    # Storing.

    def _store_state(self, node: Node, offset: int, parent: bytes, claims: Collection[str]) -> None:
        if self.state_bytes is not None:
            name, slot, bytes_ = (
                RecordName(parent, True, pack_tokens(node.key[:offset])),
                node.snapshots[offset],
                self.state_bytes,
            )
            self._store(name, claims, lambda: bytes_.read(slot))

    def _store(self, name: RecordName, claims: Collection[str], read: Callable[[], Tensor]) -> None:
        record = self.index.get(name)
        if record is not None:
            self.index.claim(record, claims)
            self._touch(record)
            return
        record = Record(name, set(claims))
        data = read()
        if not self._put(record, data):
            self.stats.pages_dropped += 1
            return
        self.index.add(record)
        self.stats.pages_written += 1
        self.stats.bytes_written += len(data)

    def _put(self, record: Record, data: Tensor) -> bool:
        if self.host is not None and self.host.put(record, data):
            return True
        return self.disk is not None and self.disk.put(record, data.cpu())

    def _touch(self, record: Record) -> None:
        if self.host is not None and record in self.host:
            self.host.touch(record)
        if self.disk is not None:
            self.disk.touch(record)

    # Finding.

    def _find_pages(
        self, parent: bytes, tokens: Sequence[int], start: int, limit: int, max_bytes: float
    ) -> tuple[list[Part], int]:
        """Return the pages that continue a path, and the number of tokens with them."""
        size, pages, position = self._cache.page_size, list[Part](), start
        while position < limit and (len(pages) + 1) * self.page_bytes.num_bytes <= max_bytes:
            rest = pack_tokens(tokens[position : min(position + size, limit)])
            record = self.index.find_page(parent, rest)
            if record is None:
                break
            pages.append(Part(position, record))
            common = count_common(record.name.tokens, rest)
            position += common
            if common < size:
                break
            parent = self._chain.extend(parent, rest)
        return pages, position

    def _find_with_state(
        self,
        match: Match,
        namespace: str | None,
        tokens: Sequence[int],
        limit: int,
        pages: list[Part],
        end: int,
    ) -> Plan | None:
        """Return the pages up to the last state that lies behind a match, on cached pages or on these."""
        size = self._cache.page_size
        if not pages:  # a cached page may begin with the next tokens, and have lost its state alone
            end = self._cache.tree.match(namespace, tokens, limit).num_tokens
        first = match.num_tokens // size
        parent = self._compute_digest(match.path[first - 1]) if first else self._chain.start(namespace)
        parents = [parent]
        for position in range(first * size, end - size + 1, size):
            parents.append(self._chain.extend(parents[-1], pack_tokens(tokens[position : position + size])))
        for index in range(-(-end // size) - 1, first - 1, -1):
            start = index * size
            state = self.index.find_state(parents[index - first], pack_tokens(tokens[start : min(start + size, end)]))
            if state is None:
                continue
            end = start + len(state.name.tokens) // TOKEN_BYTES
            if end <= match.num_tokens or self.state_bytes is None:
                return None
            needed = [page for page in pages if page.start < end]
            num_bytes = len(needed) * self.page_bytes.num_bytes + self.state_bytes.num_bytes
            return Plan(needed, Part(start, state), end - match.num_tokens, num_bytes)
        return None

    def _compute_digest(self, node: Node) -> bytes:
        """Return the digest of all tokens up to the end of a full page; pages keep theirs."""
        path: list[Node] = []
        while not node.digest and node.parent is not None:
            path.append(node)
            node = node.parent
        digest = node.digest if node.parent is not None else self._chain.start(node.namespace)
        for one in reversed(path):
            digest = one.digest = self._chain.extend(digest, pack_tokens(one.key))
        return digest

    def _find_parent_digest(self, node: Node) -> bytes:
        assert node.parent is not None
        return self._compute_digest(node.parent)
