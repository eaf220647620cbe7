"""The key-value memory of one model: the tensors, and a page table for every sequence that runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.layer import LayerAttentionConfig
from engine.cache.leases import Leases
from engine.cache.pages import PagePool
from engine.cache.radix_tree import Match, Node, PrefixTree
from engine.device import CPU, DeviceConfig, to_device
from kernels.cpu.runtime.memory import resident
from kernels.quantize import LIMITS


def token_bytes(about: LayerAttentionConfig, dtype: torch.dtype) -> int:
    """Size of one token's keys and values in one layer of a cache of ``dtype``, with their scales if it has some."""
    vector = about.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype in LIMITS else 0)
    return 2 * about.kv_heads * vector


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of one running sequence, in token order."""

    row: int
    """Row of ``KVCache.pages`` that mirrors ``pages`` for the kernels."""
    pages: list[int]
    namespace: str | None
    """Where in the tree its pages are."""
    node: Node | None
    """The last of this sequence's full pages that is in the tree."""
    shared: int
    """How many leading pages are in the tree."""
    cached_tokens: int
    """Tokens whose keys and values were found when the table was opened."""
    tail: Node | None = None
    """The tree's node for the partial page after them, if this sequence published it. Only this sequence grows it."""


class KVCache:
    """Pages of keys and values, shared by prefix.

    A sequence is opened (which finds what is cached), given room as it grows, published as its tokens are committed and
    closed when it leaves. Full pages are shared; of a partial page the matching slots are copied (copy on write), so
    that a cached prefix is found to the token. Nothing is shared between namespaces.

    ``data``: ``[layers, 2, kv_heads, pages, page_size, head_dim]``, keys before values. A head's consecutive pages
    are one matrix, which a product can read in place. Each vector of 8-bit ``data`` has a float32 in ``scales``,
    ``[layers, 2, kv_heads, pages, page_size]``, which goes wherever the vector goes.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int,
        rows: int,
        context: int,
        device_config: DeviceConfig = CPU,
        dtype: torch.dtype | None = None,
        max_pinned: int = 0,
        lease_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``dtype``: of ``data``, by default that of ``device_config``; the 8-bit ones are int8 and float8_e4m3fn.
        ``max_pinned``: pages that leases may pin; they lapse when nobody touches them for ``lease_seconds``."""
        self.page_size = page_size
        slots = layers, 2, kv_heads, pages, page_size
        self.data = _zeros((*slots, head_dim), dtype or device_config.dtype, device_config)
        self.scales = _zeros(slots, torch.float32, device_config) if self.data.dtype in LIMITS else None
        # Torch can copy float8 but not scatter it; its bytes can be.
        numbers = self.data if self.scales is None else self.data.view(torch.int8)
        self._parts = [numbers] if self.scales is None else [numbers, self.scales[..., None]]
        """All that belongs to a slot, ``[layers, 2, kv_heads, pages, page_size, …]``."""
        # Of a few slots NumPy copies the numbers in a fifth of the time that torch takes to find out how.
        self._copied: list[Any] = (
            self._parts if device_config.uses_gpu_kernels else [part.numpy() for part in self._parts]
        )
        """The same, to copy a few slots."""
        self.pages: npt.NDArray[np.int64] = np.zeros((rows, -(-context // page_size)), np.int64)
        self._leases_of = partial(Leases, cap=max_pinned, seconds=lease_seconds, clock=clock)
        self._start_empty()

    def _start_empty(self) -> None:
        self._rows = list(range(len(self.pages) - 1, -1, -1))
        self._tables: dict[int, PageTable] = {}
        self.pool = PagePool(self.data.shape[3])
        self.tree = PrefixTree(self.pool, self.page_size)
        self.leases = self._leases_of(self.tree)

    def reset(self) -> None:
        """Forgets every table, prefix and lease, whatever state they are in, and clears what was written: see
        ``_zeros``."""
        for part in self._parts:
            part[:, :, :, : self.pool.touched] = 0
        self.pages.fill(0)
        self._start_empty()

    def scales_of(self, layers: int | slice) -> Tensor | None:
        """The scales of a layer or of some, if ``data`` has 8 bits."""
        return None if self.scales is None else self.scales[layers]

    @property
    def available(self) -> int:
        """Pages that are free or can be freed at once."""
        return self.pool.free + self.tree.idle

    @property
    def used_tokens(self) -> int:
        """Slots in pages that are not free, cached ones included."""
        return (self.pool.size - self.pool.free) * self.page_size

    @property
    def open_tables(self) -> int:
        """Sequences that have a table."""
        return len(self._tables)

    def find(
        self, tokens: Sequence[int], limit: int, namespace: str | None = None, known: Match | None = None
    ) -> Match:
        """The longest cached prefix of at most ``limit`` tokens; ``known``: an earlier answer to the same question."""
        return self.tree.match(namespace, tokens, limit, known)

    def fits(self, match: Match, tokens: int, reserve: int) -> bool:
        """Whether a table opened on the match could grow to ``tokens`` tokens and leave ``reserve`` pages."""
        needed = -(-tokens // self.page_size) - len(match.nodes) + reserve
        if needed <= self.available - len(match.nodes):
            return True
        holders = self.pool.holders
        return needed <= self.available - sum(holders[node.page] == 1 for node in match.nodes)

    def open(self, match: Match, namespace: str | None = None) -> PageTable:
        """A table that starts with what ``find`` just found. Needs a free row."""
        if match.version != self.tree.version:
            raise RuntimeError("the cache has changed since the prefix was looked up")
        pages = [node.page for node in match.nodes]
        self.tree.hold(pages)
        last = match.nodes[-1] if match.nodes else None
        table = PageTable(self._rows.pop(), pages, namespace, last, len(pages), len(pages) * self.page_size)
        self.pages[table.row, : len(pages)] = pages
        self._tables[table.row] = table
        if match.tail is not None:
            self._copy_tail(table, match.tail, match.tail_tokens)
        return table

    def reserve(self, table: PageTable, tokens: int) -> bool:
        """Gives the table room for ``tokens`` tokens. ``False`` when memory is exhausted; what it got stays its own."""
        while len(table.pages) * self.page_size < tokens:
            page = self._take()
            if page is None:
                return False
            self._append(table, page)
        return True

    def move(self, moves: Sequence[tuple[PageTable, int, int]]) -> None:
        """Copies the keys and values of tokens of tables from one position to another, all at once."""
        places = [(self._slot(table, start), self._slot(table, end)) for table, start, end in moves]
        source, target = to_device(torch.tensor(places), self.data.device).unbind(1)
        for part in self._parts:
            slots = part.flatten(3, 4)
            slots[:, :, :, target] = slots[:, :, :, source]

    def publish(self, table: PageTable, tokens: Sequence[int], computed: int, *, tail: bool) -> Node | None:
        """Puts the table's pages into the tree as far as their ``computed`` first tokens fill them.

        With ``tail`` the last, partial page too: its owner may still append to it, since a reader copies only the slots
        that the tree's key names. Answers the cached page that ends what is published, if any is.
        """
        size = self.page_size
        while (table.shared + 1) * size <= computed:
            self._publish_page(table, tuple(tokens[table.shared * size : (table.shared + 1) * size]))
        rest = tuple(tokens[table.shared * size : computed])
        if not tail or not rest:
            return table.node
        parent = self._last(table)
        covering = self.tree.covering(parent, rest)
        if covering is not None:
            return covering
        if table.tail is None:
            table.tail = self.tree.insert(parent, rest, table.pages[table.shared])
        else:
            self.tree.grow(table.tail, rest)
        return table.tail

    def close(self, table: PageTable) -> None:
        """Lets go of every page: published ones stay cached until memory is needed, the others are free."""
        del self._tables[table.row]
        # From the end, so that of pages released together the later ones are the older and go first.
        self.tree.release(table.pages[::-1])
        self._rows.append(table.row)

    def clear(self) -> None:
        """Frees every page that no table holds, pinned or not."""
        self.leases.clear()
        while self.tree.evict():
            pass

    def check(self) -> None:
        """Raises ``RuntimeError`` unless free + cached + private pages are all pages and every count is right."""
        self.tree.check()
        self.leases.check()
        cached = [node.page for node in self.tree.walk()]
        held = [page for table in self._tables.values() for page in table.pages]
        self.pool.check(cached + held)
        private = set(held) - set(cached)
        if self.pool.free + len(cached) + len(private) != self.pool.size:
            raise RuntimeError("free, cached and private pages do not add up")
        if len(private) != sum(page in private for page in held):
            raise RuntimeError("two sequences hold the same private page")
        for table in self._tables.values():
            if self.pages[table.row, : len(table.pages)].tolist() != table.pages:
                raise RuntimeError(f"row {table.row} does not mirror its table")
            shared = [node.page for node in self.path(table)]
            if shared != table.pages[: len(shared)] or len(shared) != table.shared + (table.tail is not None):
                raise RuntimeError(f"row {table.row} does not point at the cached pages of its tokens")

    def path(self, table: PageTable) -> list[Node]:
        """The cached pages that the table published or found, in token order."""
        node = table.tail or table.node
        nodes: list[Node] = []
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def _last(self, table: PageTable) -> Node:
        """What the next page of the table comes after in the tree. A root is looked up each time: it comes and goes."""
        return self.tree.root(table.namespace) if table.node is None else table.node

    def _publish_page(self, table: PageTable, key: tuple[int, ...]) -> None:
        index, parent = table.shared, self._last(table)
        twin = parent.children.get(key)
        if twin is not None:
            # Somebody computed the same tokens first. Point at their page before letting go of ours.
            self.tree.hold([twin.page])
            ours, table.pages[index] = table.pages[index], twin.page
            self.pages[table.row, index] = twin.page
            if table.tail is not None:
                self.tree.replace(table.tail, twin)
            self.tree.release([ours])
            table.node = twin
        elif table.tail is not None:
            self.tree.grow(table.tail, key)
            table.node = table.tail
        else:
            table.node = self.tree.insert(parent, key, table.pages[index])
        table.tail = None
        table.shared += 1

    def _copy_tail(self, table: PageTable, source: Node, tokens: int) -> None:
        """Copies the first slots of a cached page into a page of the table's own, if there is one to have."""
        # Held meanwhile: making room must not evict the page that is about to be read.
        self.tree.hold([source.page])
        page = self._take()
        if page is not None:
            for part in self._copied:
                part[:, :, :, page, :tokens] = part[:, :, :, source.page, :tokens]
            self._append(table, page)
            table.cached_tokens += tokens
        self.tree.release([source.page])

    def _append(self, table: PageTable, page: int) -> None:
        self.pages[table.row, len(table.pages)] = page
        table.pages.append(page)

    def _slot(self, table: PageTable, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return table.pages[page] * self.page_size + offset

    def _take(self) -> int | None:
        page = self.pool.take()
        while page is None and (self.tree.evict() or self.leases.lapse()):
            page = self.pool.take()
        return page


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device_config: DeviceConfig) -> Tensor:
    """Not empty: a masked slot still meets its weight of zero, and zero times a stray NaN would be NaN."""
    if device_config.uses_gpu_kernels:
        return torch.zeros(shape, dtype=dtype, device=device_config.device)
    size = math.prod(shape)
    words = resident(-(-size * dtype.itemsize // 4))
    return words.view(dtype)[:size].view(shape)
