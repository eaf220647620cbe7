"""Describe how the tokens of one step attend, and find the prefixes that are worth reading once for several sequences.

A row is one sequence of the step. Its new tokens (queries) are the last of its tokens, whose keys and values lie in
pages:

```
tokens of a row    | computed before this step       | new tokens  |
                   0              seq_len - query_len              seq_len
its pages          | page_table[row, 0] | page_table[row, 1] | page_table[row, 2] |
```

The new tokens of a row follow each other, or are a tree of draft tokens: each token of a tree sees itself and its
ancestors. Rows whose first pages are the same may read these together, as a *shared prefix*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionCostModel:
    """Decide when reading a shared prefix once is faster, in bytes of keys and values that one layer reads.

    A shared prefix saves every row but the first the reading of its keys and values. It costs a fixed time, and some
    for each query whose two results are merged. Both are expressed as the bytes that could be read meanwhile. The
    defaults are those of torch on a CPU. ``python -m benchmarks.engine.cascade`` measures both sides on a CPU; for a
    GPU see ``engine.attention.gpu_costs``.
    """

    kv_bytes_per_token: int
    """Bytes of one token's keys and values in one layer."""
    piece_cost_bytes: int = 2_800_000
    """Fixed cost of one shared prefix."""
    query_cost_bytes: int = 30_000
    """Cost of merging one query's results."""

    @classmethod
    def for_compiled_kernel(cls, kv_bytes_per_token: int) -> AttentionCostModel:
        """Return the costs of ``NumbaAttention``, which launches and gathers nothing for a shared prefix."""
        return cls(kv_bytes_per_token, piece_cost_bytes=100_000, query_cost_bytes=2_000)

    @property
    def as_bytes(self) -> tuple[int, int, int]:
        """All three numbers, as kernels take them."""
        return self.kv_bytes_per_token, self.piece_cost_bytes, self.query_cost_bytes

    def should_share(self, num_tokens: int, num_rows: int, num_queries: int) -> bool:
        """Return True if rows with ``num_queries`` queries in all should read ``num_tokens`` tokens together."""
        saved_bytes = (num_rows - 1) * num_tokens * self.kv_bytes_per_token
        return saved_bytes > self.piece_cost_bytes + self.query_cost_bytes * num_queries


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Visibility among the new tokens of a row when they form a tree."""

    depths: IntArray
    """``[queries]`` positions of the tokens, relative to the first."""
    visible: npt.NDArray[np.bool_]
    """``[queries, queries]``, True where a token sees another: itself and its ancestors."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Consecutive pages that several rows read together."""

    rows: IntArray
    first_page: int
    """Column of the page table where the pages begin, the same in every row."""
    num_tokens: int


@dataclass(frozen=True)
class AttentionMetadata:
    """Page tables and lengths of a step's rows, in the order of the batch's flat tokens."""

    page_table: IntArray
    """``[rows, max_pages]``."""
    query_lens: IntArray
    """``[rows]`` new tokens."""
    seq_lens: IntArray
    """``[rows]`` all tokens, the new ones included."""
    page_size: int
    num_pool_pages: int
    kv_heads: int
    heads_per_kv: int
    cost_model: AttentionCostModel
    tree_masks: Mapping[int, TreeMask] = field(default_factory=dict)
    """Masks of the rows whose new tokens form a tree."""

    @cached_property
    def is_decode(self) -> bool:
        """True if every row has one new token."""
        return int(self.query_lens.max()) == 1 and not self.tree_masks

    @cached_property
    def token_indices(self) -> IntArray:
        """``[tokens]`` index of every flat token in its row; the tokens of a tree lie one after the other."""
        ends = np.cumsum(self.query_lens)
        indices: IntArray = np.arange(ends[-1]) + np.repeat(self.seq_lens - ends, self.query_lens)
        return indices

    @cached_property
    def slots(self) -> IntArray:
        """``[tokens]``, ``page * page_size + offset`` of every flat token."""
        column, offset = np.divmod(self.token_indices, self.page_size)
        rows = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        slots: IntArray = self.page_table[rows, column] * self.page_size + offset
        return slots

    @property
    def query_starts(self) -> IntArray:
        """``[rows]`` first flat token of each row."""
        return np.cumsum(self.query_lens) - self.query_lens

    def flat_tokens(self, rows: IntArray) -> IntArray:
        """Return the flat tokens of some rows, one row after the other."""
        starts = self.query_starts
        return np.concatenate([np.arange(starts[row], starts[row] + self.query_lens[row]) for row in rows])


def kv_slots(slots: IntArray, num_pool_slots: int, num_vectors: int) -> IntArray:
    """Return where tokens' keys and values, ``num_vectors`` of each token, lie in one layer's pool seen as
    ``[num_vectors * num_pool_slots, head_dim]``: for each token the keys of all heads, then the values."""
    return (slots[:, None] + num_pool_slots * np.arange(num_vectors)).reshape(-1)


def find_shared_prefixes(metadata: AttentionMetadata, num_full_pages: IntArray) -> tuple[IntArray, list[SharedPrefix]]:
    """Return the first page that each row reads for itself, and the prefixes worth reading once for several rows.

    ``num_full_pages``: ``[rows]`` pages that lie before each row's new tokens. Rows are divided by their pages as in a
    radix tree; a shared prefix begins where the one before it on the same path ended.
    """
    own_first_page = np.zeros(len(num_full_pages), np.int64)
    shared: list[SharedPrefix] = []
    if len(num_full_pages) == 1:
        return own_first_page, shared

    def share(members: IntArray, depth: int) -> None:
        limit = int(num_full_pages[members].min())
        tables = metadata.page_table[members, depth:limit]
        same = (tables == tables[0]).all(axis=0)
        split = depth + (int(same.argmin()) if not same.all() else limit - depth)
        begin = int(own_first_page[members[0]])
        num_tokens = (split - begin) * metadata.page_size
        num_queries = int(metadata.query_lens[members].sum())
        if num_tokens and metadata.cost_model.should_share(num_tokens, len(members), num_queries):
            shared.append(SharedPrefix(members, begin, num_tokens))
            own_first_page[members] = split
        divide_by_page(members[num_full_pages[members] > split], split)

    def divide_by_page(members: IntArray, depth: int) -> None:
        pages = metadata.page_table[members, depth]
        ordered = np.sort(pages)
        for page in np.unique(ordered[1:][ordered[1:] == ordered[:-1]]):
            share(members[pages == page], depth)

    divide_by_page(np.flatnonzero(num_full_pages > 0), 0)
    return own_first_page, shared
