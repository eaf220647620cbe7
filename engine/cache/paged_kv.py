"""Paged KV cache of one model: the tensors, and a page table for every running sequence.

The pages of one sequence, with the fields of its ``PageTable``:

```
pages      | cached: in the radix tree, shared     | being written          | reserved                     |
           0                  num_shared_pages * page_size         computed tokens       len(pages) * page_size
```

Pages move from right to left. ``reserve`` appends free pages, steps write keys and values into them, and ``publish``
puts every page that is full into the radix tree, where the pages are shared with other sequences and never written
again. The first page being written may be in the tree, too, as ``partial_node``: readers copy its first slots.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.key_pool import KeyPool
from engine.cache.page_drops import PageDrops
from engine.cache.page_table import PageTable, RestoredPage
from engine.cache.pages import PagePool
from engine.cache.pins import Pins
from engine.cache.radix_tree import LowerTier, Match, Node, RadixTree
from engine.cache.retained import RetainedTable, RetainedTables
from engine.cache.states import StatePool
from engine.device import CPU, DeviceConfig, to_device

_NO_HEADS = HeadShape(1, 1, 2)
"""Shape of the pool of a model without keys, which has no layers."""
_MAX_DUPLICATES = 1024
"""More pages than the steps in flight release."""


class KVCache:
    """Pages of keys and values, shared by prefix.

    A page table is opened on a matched prefix, given pages as its sequence grows, published as tokens are committed and
    closed when the sequence finishes. Full pages are shared; the matching slots of a partial page are copied (copy on
    write), so that a match is exact to the token. Nothing is shared between namespaces.

    Layers of one shape share a ``KeyPool``; ``data`` and ``scales`` are those of the first layer's.
    """

    def __init__(
        self,
        *,
        layers: Sequence[HeadShape],
        pages: int,
        page_size: int,
        rows: int,
        context: int,
        device_config: DeviceConfig = CPU,
        dtype: torch.dtype | None = None,
        states: StatePool | None = None,
        max_pinned: int = 0,
        pin_seconds: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate the cache. ``layers``: the shape of each; ``rows``: most tables at a time; ``context``: most tokens
        of a table.

        ``dtype``: of ``data``, by default that of ``device_config``; quantized if it is one of ``QUANTIZED``.
        ``states``: those of layers without keys, if the model has such layers.
        ``max_pinned``: most pages that may be pinned; pins expire when they are not touched for ``pin_seconds``.
        """
        self.page_size, self._num_pages = page_size, pages
        self.states = states
        dtype = dtype or device_config.dtype
        self.pools = [
            KeyPool(
                shape,
                [index for index, other in enumerate(layers) if other == shape],
                slots=(pages, page_size),
                dtype=dtype,
                device=device_config,
            )
            for shape in dict.fromkeys(layers or [_NO_HEADS])
        ]
        self.data, self.scales = self.pools[0].data, self.pools[0].scales
        self._slot_tensors = [tensor for pool in self.pools for tensor in pool.slot_tensors]
        """Everything stored per slot, ``[layers, kinds, kv_heads, pages, page_size, …]``."""
        # NumPy copies a few slots in a fifth of the time that torch takes to set the copy up.
        self._slot_arrays: list[Any] = (
            self._slot_tensors if device_config.uses_gpu_kernels else [tensor.numpy() for tensor in self._slot_tensors]
        )
        """The same, for copies of a few slots."""
        self.lower_tier: LowerTier | None = None
        """Slower memory for claimed pages that are evicted."""
        self.page_table: npt.NDArray[np.int64] = np.zeros((rows, -(-context // page_size)), np.int64)
        self._create_pins = partial(Pins, cap=max_pinned, seconds=pin_seconds, clock=clock)
        self._create_retained = partial(RetainedTables, cap=max_pinned, seconds=pin_seconds, clock=clock)
        self._start_empty()

    def _start_empty(self) -> None:
        self._free_rows = list(range(len(self.page_table) - 1, -1, -1))
        self._tables: dict[int, PageTable] = {}
        self.pool = PagePool(self._num_pages)
        self.tree = RadixTree(self.pool, self.page_size)
        self.pins = self._create_pins(self.tree)
        self.retained = self._create_retained(self.tree)
        """Tables of ended branches that lost pages."""
        if self.states is not None:
            self.states.reset()
            self.states.connect(self.tree)
        if self.lower_tier is not None:
            self.connect(self.lower_tier)
        self._duplicates: deque[int] = deque(maxlen=_MAX_DUPLICATES)
        """Pages that were released lately since another one had the same tokens: equally damaged if that one is."""

    def connect(self, lower_tier: LowerTier) -> None:
        """Give claimed pages to a lower tier when they are evicted."""
        self.lower_tier = self.pins.lower_tier = lower_tier
        self.tree.on_evict = self._store_page
        if self.states is not None:
            self.states.on_evict = self._store_state

    def _store_page(self, node: Node) -> None:
        # A page of a pruned branch was not used since.
        claims = self.pins.find_claims(node) if node.last_used else set()
        if claims and self.lower_tier is not None:
            self.lower_tier.store_page(node, claims)

    def _store_state(self, node: Node, offset: int) -> None:
        claims = self.pins.find_claims(node)
        if claims and self.lower_tier is not None:
            self.lower_tier.store_state(node, offset, claims)

    def reset(self) -> None:
        """Drop every table, prefix and pin, and zero what was written; see ``_allocate_zeros``."""
        self.zero_pages(self.pool.high_water_mark)
        self._start_empty()

    def zero_pages(self, num_pages: int) -> None:
        """Zero the first pages and the page table, which no table uses any more or a warm-up has written to."""
        for tensor in self._slot_tensors:
            tensor[:, :, :, :num_pages] = 0
        self.page_table.fill(0)

    def layer(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Return one layer's keys and values ``[kinds, kv_heads, pages, page_size, head_dim]``, and their scales."""
        pool = next(pool for pool in self.pools if index in pool.layers)
        place = pool.layers.index(index)
        return pool.data[place], None if pool.scales is None else pool.scales[place]

    def scales_of(self, layers: int | slice) -> Tensor | None:
        """Return the scales of one or several layers, if ``data`` is quantized."""
        return None if self.scales is None else self.scales[layers]

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or can be evicted, without those of retained tables."""
        return self.pool.num_free + self.tree.num_evictable

    def count_available_pages(self, used: Collection[int] = ()) -> int:
        """Return the number of pages that are free, or can be evicted or given up.

        ``used``: pages of retained tables that are to be used, which are left out.
        """
        return self.num_available_pages + (self.retained.count_evictable(used) if len(self.retained) else 0)

    @property
    def num_used_tokens(self) -> int:
        """Slots in pages that are not free, cached ones included."""
        return (self.pool.size - self.pool.num_free) * self.page_size

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    def match_prefix(
        self, tokens: Sequence[int], limit: int, namespace: str | None = None, previous_match: Match | None = None
    ) -> Match:
        """Return the longest cached prefix of at most ``limit`` tokens; see ``RadixTree.match``.

        Of a model with states it ends at a snapshot.
        """
        if self.states is None:
            return self.tree.match(namespace, tokens, limit, previous_match)
        if previous_match is not None and previous_match.version == self.tree.version:
            return previous_match
        return self.tree.match(namespace, tokens, limit).trim_to_snapshot(self.page_size)

    def has_room(
        self, match: Match, num_tokens: int, num_reserved_pages: int, retained: RetainedTable | None = None
    ) -> bool:
        """Return True if a table opened on ``match`` could grow to ``num_tokens`` and leave the reserved pages.

        ``retained``: the table that it is opened on instead; ``num_tokens`` are then those that need new pages.
        """
        needed = -(-num_tokens // self.page_size) - len(match.nodes) + num_reserved_pages
        if needed <= self.num_available_pages - len(match.nodes):
            return True
        used = {node.page for node in match.nodes} | ({*retained.table.references} if retained is not None else set())
        num_unused = sum(self.pool.ref_counts[node.page] == 1 for node in match.nodes)
        return needed <= self.count_available_pages(used) - num_unused

    def open_table(self, match: Match, namespace: str | None = None, *, wanted: Iterable[int] = ()) -> PageTable:
        """Open a table on a match that is up to date. There must be a free row.

        ``wanted``: numbers of tokens after which another sequence is likely to go on, for snapshots of states.
        """
        if match.version != self.tree.version:
            raise RuntimeError("the cache has changed since the prefix was matched")
        pages = [node.page for node in match.nodes]
        self.tree.acquire(pages)
        last_node = match.nodes[-1] if match.nodes else None
        table = PageTable(
            self._free_rows.pop(),
            pages,
            namespace=namespace,
            last_node=last_node,
            num_shared_pages=len(pages),
            num_cached_tokens=len(pages) * self.page_size,
        )
        self.page_table[table.row, : len(pages)] = pages
        self._tables[table.row] = table
        if match.partial_page is not None:
            self._copy_partial_page(table, match.partial_page, match.num_partial_tokens)
        if self.states is not None:
            if table.num_cached_tokens < match.num_tokens:  # no memory for the copy, and no state after the full pages
                self._forget_cached(table)
                match = Match(untrimmed=match.path)
            known = len(match.path) * self.page_size
            table.state = self.states.open(match.snapshot, match.num_tokens, {*wanted, known})
        return table

    def _forget_cached(self, table: PageTable) -> None:
        """Let a table that was just opened begin without a cached prefix."""
        self.tree.release(table.pages[::-1])
        table.pages.clear()
        table.last_node, table.num_shared_pages, table.num_cached_tokens = None, 0, 0

    def reserve(self, table: PageTable, tokens: int) -> bool:
        """Append pages until the table has room for ``tokens`` tokens.

        Return ``False`` if memory is exhausted; the table keeps the pages it got.
        """
        while table.num_pages * self.page_size < tokens:
            page = self._allocate()
            if page is None:
                return False
            self._append(table, page)
        return True

    def move_tokens(self, moves: Sequence[tuple[PageTable, int, int]]) -> None:
        """Copy keys and values within tables, all at once, given ``(table, from position, to position)``."""
        slots = [(self._locate_slot(table, start), self._locate_slot(table, end)) for table, start, end in moves]
        source, target = to_device(torch.tensor(slots), self.data.device).unbind(1)
        for tensor in self._slot_tensors:
            by_slot = tensor.flatten(3, 4)
            by_slot[:, :, :, target] = by_slot[:, :, :, source]

    def publish(
        self, table: PageTable, tokens: Sequence[int], num_computed: int, *, include_partial: bool
    ) -> Node | None:
        """Put the table's pages into the radix tree as far as the first ``num_computed`` tokens fill them.

        With ``include_partial`` the last, partial page, too: its owner may still append to it, since readers copy only
        the slots that the tree's key names. Return the cached page that ends what is published, if there is any.
        """
        if table.num_dropped_pages:
            return table.last_node
        size = self.page_size
        while (table.num_shared_pages + 1) * size <= num_computed:
            start = table.num_shared_pages * size
            self._publish_page(table, tuple(tokens[start : start + size]))
        rest = tuple(tokens[table.num_shared_pages * size : num_computed])
        if not include_partial or not rest:
            return table.last_node
        parent = self._parent_of_next(table)
        extension = self.tree.find_extension(parent, rest)
        if extension is not None:
            return extension
        if table.partial_node is None:
            table.partial_node = self.tree.insert(parent, rest, table.pages[table.num_shared_pages])
        else:
            self.tree.extend(table.partial_node, rest)
        return table.partial_node

    def evict_pages(self, table: PageTable, places: Iterable[int], num_kept: int) -> None:
        """Let a table lose pages, given their places among ``PageTable.pages`` in descending order.

        What is computed later depends on that, so nothing of this table is published any more. What it alone uses of
        the tree is taken out, but for the first ``num_kept`` pages: a page there is not free before those after it.
        """
        if not table.num_dropped_pages:
            self._take_from_tree(table, num_kept)
        for place in places:
            page = table.pages.pop(place)
            table.num_dropped_pages += 1
            if page in self.tree.nodes:
                table.held_pages.append(page)
            else:
                self.tree.release([page])
        self.page_table[table.row, : len(table.pages)] = table.pages

    def _take_from_tree(self, table: PageTable, num_kept: int) -> None:
        """Remove the last published pages of a table from the tree, as far as nothing else uses them."""
        path = self.cached_path(table)
        table.partial_node = None
        while len(path) > num_kept and not path[-1].children and self.pool.ref_counts[path[-1].page] == 2:
            node = path.pop()
            self.pins.unpin(node)
            self.tree.remove(node)
        table.num_shared_pages = min(table.num_shared_pages, len(path))
        table.last_node = path[table.num_shared_pages - 1] if table.num_shared_pages else None

    def retain_table(
        self, table: PageTable, tokens: Sequence[int], drops: PageDrops, *, key: str, scope: Hashable
    ) -> None:
        """Close a table that lost pages, and keep it for a request with ``scope`` that goes on with its ``tokens``."""
        num_pages = -(-len(tokens) // self.page_size) - table.num_dropped_pages
        self.tree.release(table.pages[num_pages:][::-1])
        del table.pages[num_pages:]
        del self._tables[table.row]
        self._free_rows.append(table.row)
        self.retained.add(table, tokens, drops, key=key, scope=scope)

    def reopen_table(self, retained: RetainedTable, namespace: str | None, *, is_shared: bool) -> PageTable | None:
        """Open a table on a retained one. There must be a free row.

        ``is_shared``: the retained one stays for other branches, so that its last, partial page is copied; ``None``
        without memory for that.
        """
        old, num_tokens = retained.table, len(retained.tokens)
        pages = list(old.pages)
        if is_shared:
            self.retained.acquire(retained)
            if num_tokens % self.page_size:
                page = self._copy_slots(pages[-1], num_tokens % self.page_size)
                self.tree.release([pages.pop()])
                if page is None:
                    self.tree.release([*reversed(pages), *old.held_pages])
                    return None
                pages.append(page)
        else:
            self.retained.take(retained)
        table = replace(
            old,
            row=self._free_rows.pop(),
            pages=pages,
            namespace=namespace,
            num_cached_tokens=num_tokens,
            held_pages=list(old.held_pages),
        )
        self.page_table[table.row, : len(pages)] = pages
        self._tables[table.row] = table
        return table

    def close_table(self, table: PageTable) -> None:
        """Release every page: published ones stay cached until memory is needed, the others are free."""
        del self._tables[table.row]
        if self.states is not None and table.state is not None:
            self.states.close(table.state)
        self.tree.release(table.references)
        self._free_rows.append(table.row)

    def find_damaged(self, tables: Iterable[PageTable]) -> set[int]:
        """Return the pages of some tables in which a key or a value is not finite."""
        damaged = {page for table in tables for page in table.pages if not self._is_finite(page)}
        return damaged if self.states is None else damaged | self.states.find_damaged()

    def _is_finite(self, page: int) -> bool:
        return all(pool.is_finite(page) for pool in self.pools)

    def drop(self, pages: Collection[int]) -> None:
        """Forget and zero pages that no table references, and all cached pages after them, which depend on them."""
        self.retained.clear()
        nodes = [self.tree.nodes[page] for page in pages if page in self.tree.nodes]
        dropped = {page for page in self._duplicates if not self.pool.ref_counts[page] and not self._is_finite(page)}
        dropped.update(pages)
        if self.lower_tier is not None:  # copies may be damaged, too, and would come back again and again
            self.lower_tier.clear()
        for node in nodes:
            dropped.update(self._drop_subtree(node))
        for tensor in self._slot_tensors:
            tensor[:, :, :, sorted(dropped)] = 0

    def _drop_subtree(self, root: Node) -> list[int]:
        """Remove a cached page and all after it from the tree, if it is there; return them."""
        if self.tree.nodes.get(root.page) is not root:
            return []
        nodes = [root]
        for node in nodes:
            nodes += node.children.values()
        for node in reversed(nodes):
            self.pins.unpin(node)
            self.tree.remove(node)
        return [node.page for node in nodes]

    def clear(self) -> None:
        """Free every page that no table references, pinned or not, and empty the lower tier."""
        self.pins.clear()
        self.retained.clear()
        if self.lower_tier is not None:
            self.lower_tier.clear()
        while self.tree.evict():
            pass

    def check(self) -> None:
        """Raise ``RuntimeError`` unless free, cached and private pages are all pages and every count is right."""
        self.tree.check()
        self.pins.check()
        cached = [node.page for node in self.tree.walk()]
        referenced = [page for table in self._tables.values() for page in table.references]
        retained = self.retained.list_references()
        self.pool.check(cached + referenced + retained)
        private = set(referenced) - set(cached)
        if self.pool.num_free + len(cached) + len(private | {*retained} - {*cached}) != self.pool.size:
            raise RuntimeError("free, cached and private pages do not add up")
        # Branches that go on from one retained table share its pages.
        private -= {page for table in self._tables.values() if table.num_dropped_pages for page in table.pages}
        if len(private) != sum(page in private for page in referenced):
            raise RuntimeError("two sequences reference the same private page")
        for table in self._tables.values():
            if self.page_table[table.row, : len(table.pages)].tolist() != table.pages:
                raise RuntimeError(f"row {table.row} does not mirror its table")
            shared = [node.page for node in self.cached_path(table)]
            num_published = table.num_shared_pages + (table.partial_node is not None)
            is_held = table.num_dropped_pages and {*shared} <= {*table.references}
            if not is_held and (shared != table.pages[: len(shared)] or len(shared) != num_published):
                raise RuntimeError(f"row {table.row} does not point at the cached pages of its tokens")
        if self.states is not None:
            states = [table.state for table in self._tables.values() if table.state is not None]
            self.states.check(states, self.tree.walk())
        if self.lower_tier is not None:
            self.lower_tier.check()

    # Pages of a lower tier.

    @property
    def slot_tensors(self) -> Sequence[Tensor]:
        """Everything stored per slot, ``[layers, kinds, kv_heads, pages, page_size, …]``."""
        return self._slot_tensors

    def restore(self, match: Match, namespace: str | None, pages: Iterable[RestoredPage]) -> list[Node]:
        """Put pages that a lower tier had into the tree, behind a match that is up to date.

        ``pages``: in token order. Those that are cached meanwhile are skipped. It ends early where a page before is
        missing, or where memory is exhausted. Return the cached path, which no table references yet.
        """
        path = list(match.path)
        self.tree.acquire([node.page for node in path])
        for page in pages:
            position = len(path) * self.page_size
            if page.start < position:
                continue
            node = self._restore_page(path, namespace, page) if page.start == position else None
            if node is None:
                break
            path.append(node)
            if len(node.key) < self.page_size:
                break
        self.tree.release([node.page for node in reversed(path)])
        return path

    def _restore_page(self, path: Sequence[Node], namespace: str | None, page: RestoredPage) -> Node | None:
        """Return the cached page with the tokens of a restored one, with a reference; ``None`` without memory."""
        parent = path[-1] if path else self.tree.root(namespace)
        existing = self.tree.find_extension(parent, page.key)
        if existing is not None:
            self.tree.acquire([existing.page])
            return existing
        number = self._allocate()
        if number is None:
            return None
        page.write(number)
        # A root comes and goes; making room may have evicted its last page.
        return self.tree.insert(path[-1] if path else self.tree.root(namespace), page.key, number)

    def cached_path(self, table: PageTable) -> list[Node]:
        """Return the cached pages that the table published or matched, in token order."""
        node = table.partial_node or table.last_node
        nodes: list[Node] = []
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    # States.

    def keep_state(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Keep the present state of a table as a snapshot, if the pages of its tokens are published."""
        if self.states is not None and table.state is not None:
            self.states.share_snapshot(self._find_path(table, tokens), table.state, self.page_size)

    def keep_last_state(self, table: PageTable, tokens: Sequence[int], num_tokens: int) -> None:
        """Keep the state after ``num_tokens`` tokens of a table that ends, if it has that state."""
        if self.states is None or table.state is None:
            return
        self.states.rewind(table.state, num_tokens)
        if table.state.num_tokens == num_tokens:
            self.keep_state(table, tokens)

    def keep_snapshots(self, table: PageTable, tokens: Sequence[int], slots: Iterable[tuple[int, int]]) -> None:
        """Keep slots as snapshots, given the numbers of tokens that they are the states after.

        Takes over a reference to each slot; those of tokens that are not published are released.
        """
        assert self.states is not None
        path = self._find_path(table, tokens)
        for num_tokens, slot in slots:
            self.states.add_snapshot(path, num_tokens, slot, self.page_size)

    def _find_path(self, table: PageTable, tokens: Sequence[int]) -> list[Node]:
        """Return the cached pages of a table's tokens, and the one after them that begins with the rest of those that
        its state has seen."""
        assert table.state is not None
        path = self.cached_path(table)[: table.num_shared_pages]
        rest = tuple(tokens[len(path) * self.page_size : table.state.num_tokens])
        following = self.tree.find_extension(self._parent_of_next(table), rest) if rest else None
        return path if following is None else [*path, following]

    def _parent_of_next(self, table: PageTable) -> Node:
        """Return the node that the table's next page goes under. A root is looked up each time: it comes and goes."""
        return self.tree.root(table.namespace) if table.last_node is None else table.last_node

    def _publish_page(self, table: PageTable, key: tuple[int, ...]) -> None:
        index, parent = table.num_shared_pages, self._parent_of_next(table)
        existing = parent.children.get(key)
        if existing is not None:
            # Another sequence computed the same tokens first. Point at its page before releasing our own.
            self.tree.acquire([existing.page])
            duplicate, table.pages[index] = table.pages[index], existing.page
            self.page_table[table.row, index] = existing.page
            if table.partial_node is not None:
                self.tree.replace(table.partial_node, existing)
            self.tree.release([duplicate])
            self._duplicates.append(duplicate)
            table.last_node = existing
        elif table.partial_node is not None:
            self.tree.extend(table.partial_node, key)
            table.last_node = table.partial_node
        else:
            table.last_node = self.tree.insert(parent, key, table.pages[index])
        table.partial_node = None
        table.num_shared_pages += 1

    def _copy_partial_page(self, table: PageTable, source: Node, num_tokens: int) -> None:
        """Copy the first slots of a cached page into a page of the table's own, if one can be allocated."""
        # Referenced meanwhile: making room must not evict the page that is about to be read.
        self.tree.acquire([source.page])
        page = self._copy_slots(source.page, num_tokens)
        if page is not None:
            self._append(table, page)
            table.num_cached_tokens += num_tokens
        self.tree.release([source.page])

    def _copy_slots(self, source: int, num_tokens: int) -> int | None:
        """Return a new page with the first slots of one that is referenced; ``None`` without memory."""
        page = self._allocate()
        if page is not None:
            for array in self._slot_arrays:
                array[:, :, :, page, :num_tokens] = array[:, :, :, source, :num_tokens]
        return page

    def _append(self, table: PageTable, page: int) -> None:
        self.page_table[table.row, len(table.pages)] = page
        table.pages.append(page)

    def _locate_slot(self, table: PageTable, position: int) -> int:
        page_index, offset = divmod(position - table.num_dropped_pages * self.page_size, self.page_size)
        return table.pages[page_index] * self.page_size + offset

    def _allocate(self) -> int | None:
        page = self.pool.allocate()
        while page is None and (self.tree.evict() or self.retained.evict_oldest() or self.pins.evict_oldest_pins()):
            page = self.pool.allocate()
        return page
