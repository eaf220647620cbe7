"""How the tokens of one step attend: which keys are read once for several sequences, and which by each for itself.

A row is one sequence of the step: ``queries`` new tokens that end a ``context`` of tokens whose keys and values lie in
pages. Its context is cut into consecutive pieces:

* *shared* pieces, pages that lie before several rows' new tokens and are read once for all of them;
* for a row with many new tokens, everything before them (again without a mask) and the new tokens themselves (causal);
* a long beginning that lies in consecutive pages, which is read in place instead of being gathered;
* for the other rows, what is left, read by each for itself in groups of rows of similar length.

The new tokens of a row follow each other, or are a tree of guesses: then each sees itself and those that it follows.

Sliding-window layers see only the end of a context and read that alone, unshared. One plan serves every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

_WIDE = 32
"""Rows with at least this many new tokens attend to them causally and one row at a time."""
_CHUNK = 256
"""Queries of one row that attend together under a mask; it bounds the mask's and the scores' memory."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """When reading a shared piece once is faster, in bytes of keys and values that one layer reads.

    A shared piece saves each row but the first the reading of its keys and values, and costs a fixed time for its own
    products and some for each query whose two results are merged. Both are expressed as the bytes that could be read
    meanwhile; ``python -m benchmarks.engine.cascade`` measures both sides.
    """

    token_bytes: int
    """Keys and values of one token in one layer."""
    piece: int = 2_800_000
    """A piece's fixed cost."""
    query: int = 30_000
    """The merge of one query."""

    @classmethod
    def of_kernel(cls, token_bytes: int) -> CostModel:
        """For ``CompiledAttention``, which launches nothing for a piece and gathers nothing."""
        return cls(token_bytes, piece=100_000, query=2_000)

    def shares(self, tokens: int, rows: int, queries: int) -> bool:
        """Whether ``rows`` rows with ``queries`` queries in all should attend together to ``tokens`` tokens."""
        return (rows - 1) * tokens * self.token_bytes > self.piece + self.query * queries

    def reads_in_place(self, tokens: int, queries: int) -> bool:
        """Whether ``tokens`` consecutive tokens of one row should be a piece of their own. Gathering them costs about
        twice what reading them does."""
        return tokens * self.token_bytes > self.piece // 2 + self.query * queries

    def splits(self, padding: int) -> bool:
        """Whether ``padding`` tokens read in vain cost more than another group of rows."""
        return padding * self.token_bytes > self.piece


@dataclass(frozen=True, slots=True)
class Tree:
    """How the new tokens of a row follow each other when they are no chain."""

    depths: Ints
    """``[queries]`` how many positions each is behind the first."""
    sees: npt.NDArray[np.bool_]
    """``[queries, queries]`` which of them each sees: itself and those that it follows."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where keys and values lie: the pages of ``rows`` rows, equally many for each, ``tokens`` of them read."""

    rows: int
    tokens: int
    first_slot: int | None
    """They are consecutive slots from here (only for one row), and can be read in place; else see ``chunks``."""
    chunks: Tensor | None
    """``[rows, kv_heads * pages]`` to be gathered from the pool seen as ``[kv_heads * pages, …]``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that all see all of one piece of keys."""

    queries: Tensor | slice
    """Flat tokens of the batch."""
    keys: Keys


@dataclass(frozen=True, slots=True)
class Shared:
    """A stretch of keys that several rows share."""

    rows: Ints
    page: int
    """The column of the page table where it begins, in each of them."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that each read their own keys, padded to one shape."""

    queries: Tensor | slice
    """``[rows * wide]`` flat tokens of the batch; a padded query repeats its row's last one."""
    tokens: Tensor | slice
    """The same without the padded ones: where the results go."""
    kept: Tensor | None
    """``[rows * wide]`` which queries are no padding; ``None`` when all are."""
    rows: int
    wide: int
    """Queries of each row."""
    keys: Keys
    mask: Tensor | None
    """``[rows, 1, heads_per_kv * wide, keys]`` float32: 0 where a query sees a key, -inf elsewhere. ``None``: every
    query sees every key."""


@dataclass(slots=True)
class StepPlan:
    """One step's attention."""

    slots: Tensor
    """``Rows.head_slots``."""
    causal: list[slice]
    """Flat tokens of each row that attends to its own new tokens causally."""
    groups: list[Group]
    pieces: list[Piece]
    """In any order; each is merged into what its queries have so far."""
    rows: Rows
    by_window: dict[int | None, list[Group]] = field(default_factory=dict)

    def masked(self, window: int | None) -> list[Group]:
        """Groups alone that cover all tokens, for layers with a sliding window or a soft cap."""
        if window not in self.by_window:
            self.by_window[window] = self.rows.all_groups(window)
        return self.by_window[window]


@dataclass(frozen=True)
class Rows:
    """The rows of a step as arrays, in the order of the batch's flat tokens."""

    pages: Ints
    """``[rows, max_pages]``."""
    queries: Ints
    contexts: Ints
    page_size: int
    pool_pages: int
    kv_heads: int
    heads_per_kv: int
    cost: CostModel
    trees: Mapping[int, Tree] = field(default_factory=dict)
    """Of the rows whose new tokens are no chain."""

    @cached_property
    def places(self) -> Ints:
        """``[tokens]`` how many tokens lie before each of the batch's, those of a tree one after the other."""
        ends = np.cumsum(self.queries)
        places: Ints = np.arange(ends[-1]) + np.repeat(self.contexts - ends, self.queries)
        return places

    @cached_property
    def slots(self) -> Ints:
        """``[tokens]``, page * page_size + offset of every token of the batch."""
        page, offset = np.divmod(self.places, self.page_size)
        slots: Ints = self.pages[np.repeat(np.arange(len(self.queries)), self.queries), page] * self.page_size + offset
        return slots

    @property
    def starts(self) -> Ints:
        """The first flat token of each row."""
        return np.cumsum(self.queries) - self.queries

    def tokens(self, rows: Ints) -> Ints:
        """The flat tokens of some rows, one row after the other."""
        starts = self.starts
        return np.concatenate([np.arange(starts[row], starts[row] + self.queries[row]) for row in rows])

    @property
    def head_slots(self) -> Ints:
        """``[tokens * 2 * kv_heads]`` where each token's keys and values go in the pool seen as ``[2 * kv_heads *
        slots, head_dim]``."""
        return head_slots(self.slots, self.pool_pages * self.page_size, self.kv_heads)

    def keys(self, rows: Ints, first: Ints, tokens: int) -> Keys:
        """``tokens`` tokens of each row from its page ``first`` on; rows with fewer read any page instead."""
        count = -(-tokens // self.page_size)
        columns = np.minimum(first[:, None] + np.arange(count), self.pages.shape[1] - 1)
        pages = self.pages[rows[:, None], columns]
        if len(rows) == 1 and (np.diff(pages[0]) == 1).all():
            return Keys(1, tokens, int(pages[0, 0]) * self.page_size, None)
        chunks = pages[:, None, :] + self.pool_pages * np.arange(self.kv_heads)[:, None]
        return Keys(len(rows), tokens, None, torch.from_numpy(chunks.reshape(len(rows), -1)))

    def all_groups(self, window: int | None) -> list[Group]:
        """Groups for all rows, which read no page that no query of theirs sees."""
        first = _first_pages(self.queries, self.contexts, window, self.page_size)
        return self.groups(np.arange(len(self.queries)), first, window)

    def groups(self, rows: Ints, first: Ints, window: int | None = None) -> list[Group]:
        """Groups for some rows, each reading from its page ``first`` on."""
        starts = self.starts[rows]
        queries, contexts = self.queries[rows], self.contexts[rows]
        if queries.max(initial=0) > _CHUNK:
            rows, first, starts, queries, contexts = _chunked(rows, first, starts, queries, contexts)
            if window is not None:
                first = _first_pages(queries, contexts, window, self.page_size)
        lengths = contexts - first * self.page_size
        # Query counts within a factor of two, and then the longest first.
        classes = np.ceil(np.log2(queries)).astype(np.int64)
        order = np.lexsort((-lengths, classes))
        groups, begin, padding = [], 0, 0
        for end in range(1, len(order) + 1):
            if end < len(order) and classes[order[end]] == classes[order[begin]]:
                padding += int(lengths[order[begin]] - lengths[order[end]])
                if not self.cost.splits(padding):
                    continue
            part = order[begin:end]
            groups.append(self._group(rows[part], first[part], starts[part], queries[part], contexts[part], window))
            begin, padding = end, 0
        return groups

    def _group(self, rows: Ints, first: Ints, starts: Ints, queries: Ints, contexts: Ints, window: int | None) -> Group:
        wide, keys = int(queries.max()), int((contexts - first * self.page_size).max())
        offset = np.minimum(np.arange(wide), queries[:, None] - 1)
        position = ((contexts - queries)[:, None] + offset)[..., None]
        key = (first * self.page_size)[:, None, None] + np.arange(keys)
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        for place in np.flatnonzero(np.isin(rows, list(self.trees))) if self.trees else ():
            begin = int(contexts[place] - queries[place])
            tree, before = self.trees[int(rows[place])], begin - int(first[place]) * self.page_size
            _see_tree(seen[place, :, : before + len(tree.depths)], tree, offset[place], begin, window)
        flat = (starts[:, None] + offset).reshape(-1)
        kept = (np.arange(wide) < queries[:, None]).reshape(-1)
        return Group(
            queries=_tokens(flat),
            tokens=_tokens(flat[kept]),
            kept=None if kept.all() else torch.from_numpy(kept),
            rows=len(rows),
            wide=wide,
            keys=self.keys(rows, first, keys),
            mask=None if seen.all() else self._mask(seen),
        )

    def _mask(self, seen: npt.NDArray[np.bool_]) -> Tensor:
        mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
        return mask[:, None, None].expand(-1, 1, self.heads_per_kv, -1, -1).flatten(2, 3)


def head_slots(slots: Ints, capacity: int, kv_heads: int) -> Ints:
    """Where the keys and values of tokens in ``slots`` of ``capacity`` go: see ``Rows.head_slots``."""
    return (slots[:, None] + capacity * np.arange(2 * kv_heads)).reshape(-1)


def plan_step(rows: Rows) -> StepPlan:
    """The plan of a step."""
    committed = rows.contexts - rows.queries
    first, shared = share_prefixes(rows, committed // rows.page_size)
    pieces = [
        Piece(_tokens(rows.tokens(part.rows)), rows.keys(part.rows[:1], np.array([part.page]), part.tokens))
        for part in shared
    ]
    starts = rows.starts
    wide = rows.queries >= _WIDE
    wide[list(rows.trees)] = False
    causal = [slice(int(starts[row]), int(starts[row] + rows.queries[row])) for row in np.flatnonzero(wide)]
    for row, tokens in zip(np.flatnonzero(wide), causal, strict=True):
        before = int(committed[row] - first[row] * rows.page_size)
        if before:
            pieces.append(Piece(tokens, rows.keys(np.array([row]), first[[row]], before)))
    narrow = np.flatnonzero(~wide)
    pieces += _in_place(rows, narrow, first, committed // rows.page_size)
    return StepPlan(
        slots=torch.from_numpy(rows.head_slots),
        causal=causal,
        groups=rows.groups(narrow, first[narrow]),
        pieces=pieces,
        rows=rows,
    )


def _in_place(rows: Rows, narrow: Ints, first: Ints, full: Ints) -> list[Piece]:
    """Pieces of rows whose pages, from ``first`` on, are consecutive for long; ``first`` moves behind them."""
    pieces = []
    long = narrow[(full - first)[narrow] * rows.page_size * rows.cost.token_bytes > rows.cost.piece // 2]
    for row in long.tolist():
        pages = rows.pages[row, first[row] : full[row]]
        jumps = np.flatnonzero(np.diff(pages) != 1)
        count = int(jumps[0]) + 1 if len(jumps) else len(pages)
        queries = int(rows.queries[row])
        if rows.cost.reads_in_place(count * rows.page_size, queries):
            start = int(rows.starts[row])
            pieces.append(
                Piece(slice(start, start + queries), rows.keys(np.array([row]), first[[row]], count * rows.page_size))
            )
            first[row] += count
    return pieces


def share_prefixes(rows: Rows, full: Ints) -> tuple[Ints, list[Shared]]:
    """What is worth reading once for several rows, and for each row the page at which its own part begins.

    ``full``: ``[rows]`` pages that lie before each row's new tokens. Rows are divided by their pages as in a prefix
    tree; a piece begins where the piece before it on the same path ended.
    """
    begins = np.zeros(len(full), np.int64)
    shared: list[Shared] = []
    if len(full) == 1:
        return begins, shared

    def divide(members: Ints, depth: int) -> None:
        limit = int(full[members].min())
        same = (rows.pages[members, depth:limit] == rows.pages[members[0], depth:limit]).all(axis=0)
        split = depth + (int(same.argmin()) if not same.all() else limit - depth)
        begin = int(begins[members[0]])
        tokens, queries = (split - begin) * rows.page_size, int(rows.queries[members].sum())
        if tokens and rows.cost.shares(tokens, len(members), queries):
            shared.append(Shared(members, begin, tokens))
            begins[members] = split
        deeper = members[full[members] > split]
        divide_by_page(deeper, split)

    def divide_by_page(members: Ints, depth: int) -> None:
        pages = rows.pages[members, depth]
        ordered = np.sort(pages)
        for page in np.unique(ordered[1:][ordered[1:] == ordered[:-1]]):
            divide(members[pages == page], depth)

    divide_by_page(np.flatnonzero(full > 0), 0)
    return begins, shared


def _chunked(
    rows: Ints, first: Ints, starts: Ints, queries: Ints, contexts: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Rows of many queries as several rows of at most ``_CHUNK``."""
    counts = -(-queries // _CHUNK)
    offset = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * _CHUNK
    rows, first, starts, queries, contexts = (
        np.repeat(array, counts) for array in (rows, first, starts, queries, contexts)
    )
    left = queries - offset
    size = np.minimum(left, _CHUNK)
    return rows, first, starts + offset, size, contexts - left + size


def _see_tree(seen: npt.NDArray[np.bool_], tree: Tree, queries: Ints, begin: int, window: int | None) -> None:
    """Corrects what the queries of one row see, ``[queries, keys]``, where they are a tree: the last keys are its
    tokens, and the first of them has position ``begin``."""
    depths = tree.depths[queries]
    own = tree.sees[queries]
    if window is not None:
        position = np.arange(begin - seen.shape[1] + len(tree.depths), begin)
        seen[:, : -len(tree.depths)] = position > (begin + depths)[:, None] - window
        own = own & (tree.depths > depths[:, None] - window)
    seen[:, -len(tree.depths) :] = own


def _first_pages(queries: Ints, contexts: Ints, window: int | None, page_size: int) -> Ints:
    """The page of the first key that each row's first query sees."""
    if window is None:
        return np.zeros(len(queries), np.int64)
    first: Ints = np.maximum(contexts - queries - window + 1, 0) // page_size
    return first


def _tokens(flat: Ints) -> Tensor | slice:
    """Flat tokens as a slice where they are consecutive: a view instead of a copy."""
    if (np.diff(flat) == 1).all():
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return torch.from_numpy(flat)
