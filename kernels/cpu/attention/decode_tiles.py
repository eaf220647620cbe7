"""Planning the tiles of a GPU's attention for a step in which every sequence computes one token, in one kernel.

``kernels.common.attention_schedule.plan_tiles`` defines the tiles and is the reference; in NumPy it is a hundred small
operations, which cost more than the rest of such a step on the host while the GPU waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.common.attention_schedule import (
    BEGIN,
    COUNT,
    END,
    FIELDS,
    FIRST,
    FREE,
    KEY_ALIGNMENT,
    LOW,
    MIN_KEYS,
    NO_TREE,
    PARTIAL,
    ROW,
    START,
    TREE,
    Ints,
    TilePlan,
    tile_height,
)
from kernels.cpu.attention.plan import MAX_SHARED, PrefixScratch, PrefixStep, share_prefixes
from kernels.cpu.runtime.kernel import function, int32_array, int64_array, kernel, read_arguments

_MAX_HEIGHT = 128
_HEADER = 6
"""Words of the numbers of low and high tiles, merges, partial results and entries, and of the height of high tiles."""


class DecodeTilePlanner:
    """Plans steps of the same model, one after the other: a plan is valid until the next one."""

    def __init__(
        self, *, heads_per_kv: int, kv_heads: int, head_dim: int, programs: int, is_float32: bool = False
    ) -> None:
        """For the sizes see ``plan_tiles``."""
        self._heads_per_kv = heads_per_kv
        self._heights = [tile_height(rows, heads_per_kv, head_dim, is_float32=is_float32) for rows in (64, 65)]
        self._num_tiles = max(1, programs // kv_heads)
        self._header = torch.zeros(_HEADER, dtype=torch.int64)
        self._header_numpy = self._header.numpy()
        self._results: dict[str, Tensor] = {}
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._scratch = torch.empty(0, dtype=torch.int64)
        self._max_rows = 0
        plan_decode_tiles.compile()

    def plan(
        self, pages: Ints, contexts: Ints, page_size: int, *, costs: tuple[int, int, int], window: int | None = None
    ) -> TilePlan:
        """Plan the tiles of the last of ``contexts`` ``[rows]`` tokens in ``pages`` ``[rows, columns]``.

        ``costs``: bytes of a token's keys and values, and costs in bytes of a shared prefix and of each of its queries;
        sequences read a prefix together if that is faster. With ``window`` they share none.
        """
        num_rows, num_columns = pages.shape
        if num_rows > self._max_rows:
            self._allocate(num_rows)
        if self._results["pages"].numel() < pages.size:
            self._results["pages"] = torch.empty(2 * pages.size, dtype=torch.int32)
            self._arrays["pages"] = self._results["pages"].numpy()
        low_height = max(LOW, 1 << (self._heads_per_kv - 1).bit_length())
        results, (short_height, tall_height) = self._results, self._heights
        token_bytes, piece_cost, query_cost = costs
        plan_decode_tiles(
            self._header,
            results["pages"],
            results["positions"],
            results["tokens"],
            results["low"],
            results["high"],
            results["merged"],
            results["partials"],
            results["slots"],
            self._scratch,
            torch.from_numpy(np.ascontiguousarray(pages)),
            torch.from_numpy(contexts),
            num_rows,
            num_columns,
            page_size,
            window or 0,
            self._heads_per_kv,
            low_height,
            short_height,
            tall_height,
            self._num_tiles,
            token_bytes,
            piece_cost,
            query_cost,
            threads=1,
        )
        num_low, num_high, num_merged, num_partials, num_tokens, height = self._header_numpy.tolist()
        arrays = self._arrays
        return TilePlan(
            {
                "pages": arrays["pages"][: num_rows * num_columns].reshape(num_rows, num_columns),
                "positions": arrays["positions"][:num_rows],
                "tokens": arrays["tokens"][:num_tokens],
                "low": arrays["low"][:num_low],
                "high": arrays["high"][:num_high],
                "merged": arrays["merged"][:num_merged],
                "partials": arrays["partials"][:num_partials],
                "slots": arrays["slots"][:num_rows],
            },
            height,
        )

    def _allocate(self, num_rows: int) -> None:
        """Allocate results and scratch for up to twice as many rows."""
        self._max_rows = rows = 2 * num_rows
        # A tile of queries is cut by keys into one more than its share of ``num_tiles``, low and high ones apart; each
        # row has a tile of its own, each member of a prefix is in at most one tile of it, and there are fewer prefixes
        # than rows.
        max_tiles = 2 * self._num_tiles + (2 + MAX_SHARED) * rows
        sizes: dict[str, tuple[int, ...]] = {
            "pages": (0,),
            "positions": (rows,),
            "tokens": ((1 + MAX_SHARED) * rows,),
            "low": (max_tiles, FIELDS),
            "high": (max_tiles, FIELDS),
            "merged": (rows, 3),
            "partials": ((1 + MAX_SHARED) * rows + (_MAX_HEIGHT + LOW) * self._num_tiles,),
        }
        self._results = {name: torch.empty(size, dtype=torch.int32) for name, size in sizes.items()}
        self._results["slots"] = torch.empty(rows, dtype=torch.int64)
        self._arrays = {name: tensor.numpy() for name, tensor in self._results.items()}
        self._scratch = torch.empty((_SCRATCH_WORDS + 1 + MAX_SHARED) * rows, dtype=torch.int64)


_SCRATCH_WORDS = 4 + 3 + 2 * 5 + 1 + 2
"""Words of scratch for each row: lists, groups, and prefixes of ``share_prefixes``; numbers of queries; numbers of
tiles and entries of each token. The members of prefixes come on top."""


class _Tiles(NamedTuple):
    """The tiles of one kind that are written so far, and how they are cut."""

    fields: Any
    chunk: int
    """Mean number of keys."""
    window: int


@kernel
def plan_decode_tiles(address: Any) -> None:
    """Write the arrays of an ``AttentionTiles`` and their sizes.

    Arguments ``(header, pages, positions, tokens, low, high, merged, partials, slots, scratch, table, contexts, rows,
    columns, page_size, window, heads_per_kv, low_height, short_height, tall_height, num_tiles, token_bytes, piece,
    query)``. ``table``: ``[rows, columns]`` page table; ``window``: 0 for none; ``short_height``, ``tall_height``:
    heights of high tiles for at most 64 and for more rows. For the last three see ``DecodeTilePlanner.plan``.
    """
    a, _, _ = read_arguments(address)
    rows, columns, size, window, per_kv = a[12], a[13], a[14], a[15], a[16]
    table, contexts = int64_array(a[10], (rows, columns)), int64_array(a[11], rows)
    _place_tokens(table, contexts, size, int32_array(a[1], (rows, columns)), int32_array(a[2], rows), a[8])
    words = a[9]
    lists, groups = int64_array(words, (4, rows)), int64_array(words + 32 * rows, (rows, 3))
    pieces, queries = int64_array(words + 56 * rows, (2 * rows, 5)), int64_array(words + 136 * rows, rows)
    counts, members = int64_array(words + 144 * rows, (2, rows)), int64_array(words + 160 * rows, 9 * rows)
    scratch = PrefixScratch(lists[0], lists[1], lists[2], lists[3], groups)
    for row in range(rows):
        queries[row], scratch.starts[row], scratch.own_page[row], scratch.order[row] = 1, row, 0, row
        scratch.full_pages[row] = (contexts[row] - 1) // size
    num_pieces, num_members = 0, 0
    if rows > 1 and not window:
        step = PrefixStep(table, queries, contexts, size, queries, pieces, members, (a[21], a[22], a[23]))
        num_pieces, num_members = share_prefixes(step, scratch)
    tokens = int32_array(a[3], rows + num_members)
    tokens[:rows] = lists[0]
    for index in range(num_members):
        tokens[rows + index] = members[index]
    header = int64_array(a[0], 6)
    header[4] = rows + num_members
    low_queries = a[17] // per_kv
    tallest = 0
    for piece in range(num_pieces):
        queries_of_piece = pieces[piece, 4] - pieces[piece, 3]
        if queries_of_piece > low_queries:
            tallest = max(tallest, queries_of_piece * per_kv)
    header[5] = a[19] if tallest > 64 else a[18]
    max_queries = low_queries, header[5] // per_kv
    low, high = int32_array(a[4], (header[4] + 2 * a[20], 9)), int32_array(a[5], (header[4] + 2 * a[20], 9))
    own = contexts, scratch.own_page, size
    chunks = _choose_chunks(own, pieces[:num_pieces], max_queries, window, a[20])
    header[0] = _write_own_tiles(_Tiles(low, chunks[0], window), own)
    for piece in range(num_pieces):
        if pieces[piece, 4] - pieces[piece, 3] <= low_queries:
            header[0] = _write_shared_tiles(_Tiles(low, chunks[0], 0), header[0], pieces[piece], rows, low_queries)
    header[1] = 0
    for piece in range(num_pieces):
        if pieces[piece, 4] - pieces[piece, 3] > low_queries:
            header[1] = _write_shared_tiles(_Tiles(high, chunks[1], 0), header[1], pieces[piece], rows, max_queries[1])
    partial_array = int32_array(a[7], 9 * rows + 144 * a[20])
    merged = int32_array(a[6], (rows, 3))
    header[2], header[3] = _number_partials(low[: header[0]], high[: header[1]], tokens, counts, merged, partial_array)


@function
def _place_tokens(table: Any, contexts: Any, size: int, pages: Any, positions: Any, slots: int) -> None:
    """Write the page table, and each token's position and slot."""
    slot_array = int64_array(slots, len(contexts))
    for row in range(len(contexts)):
        position = contexts[row] - 1
        positions[row] = position
        slot_array[row] = table[row, position // size] * size + position % size
        for column in range(table.shape[1]):
            pages[row, column] = table[row, column]


@function
def _choose_chunks(own: Any, pieces: Any, max_queries: Any, window: int, num_tiles: int) -> Any:
    """Return the mean numbers of keys of low and high tiles."""
    (contexts, own_page, size), low, high = own, 0, 0
    for row in range(len(contexts)):
        low += contexts[row] - _own_begin(contexts[row], own_page[row] * size, window)
    for piece in pieces:
        queries, keys = piece[4] - piece[3], piece[2] - piece[1]
        if queries <= max_queries[0]:
            low += keys
        else:
            high += -(-queries // max_queries[1]) * keys
    return max(MIN_KEYS, -(-low // num_tiles)), max(MIN_KEYS, -(-high // num_tiles))


@function
def _own_begin(context: int, begin: int, window: int) -> int:
    """Return the first key that a row reads for itself."""
    return max(begin, context - window) if window else begin


@function
def _write_own_tiles(tiles: Any, own: Any) -> int:
    """Write the tiles of the keys that each row reads for itself; return their number."""
    (contexts, own_page, size), used = own, 0
    for row in range(len(contexts)):
        begin = _own_begin(contexts[row], own_page[row] * size, tiles.window)
        used = _cut_by_keys(tiles, used, (row, row, 1), begin, contexts[row])
    return used


@function
def _write_shared_tiles(tiles: Any, used: int, piece: Any, rows: int, max_queries: int) -> int:
    """Write the tiles of a shared prefix after the ``used`` ones; return the number of all."""
    for first in range(piece[3], piece[4], max_queries):
        count = min(max_queries, piece[4] - first)
        used = _cut_by_keys(tiles, used, (piece[0], rows + first, count), piece[1], piece[2])
    return used


@function
def _cut_by_keys(tiles: Any, used: int, queries: Any, begin: int, end: int) -> int:
    """Write the tiles of a range of keys, each about a chunk, after the ``used`` ones; return the number of all."""
    length = end - begin
    share = -(-length // max(1, -(-length // tiles.chunk)))
    share = max(1, -(-share // KEY_ALIGNMENT)) * KEY_ALIGNMENT
    for part in range(max(1, -(-length // share))):
        tile, first = tiles.fields[used], begin + part * share
        tile[ROW], tile[FIRST], tile[COUNT] = queries
        tile[BEGIN], tile[END] = first, min(end, first + share)
        tile[FREE] = tile[BEGIN] if tiles.window else tile[END]
        tile[TREE], tile[START], tile[PARTIAL] = NO_TREE, 0, -1
        used += 1
    return used


@function
def _number_partials(low: Any, high: Any, tokens: Any, counts: Any, merged: Any, partials: Any) -> Any:
    """Number the partial results of the tiles; return the number of ``merged`` tokens and of ``partials``."""
    counts[:] = 0
    num_tiles, num_entries, num_merged = counts[0], counts[1], 0
    for tiles in (low, high):
        for tile in tiles:
            for index in range(tile[FIRST], tile[FIRST] + tile[COUNT]):
                num_tiles[tokens[index]] += 1
    num_partials = 0
    for tiles in (low, high):
        for tile in tiles:
            is_partial = False
            for index in range(tile[FIRST], tile[FIRST] + tile[COUNT]):
                is_partial |= num_tiles[tokens[index]] > 1
            if is_partial:
                tile[PARTIAL] = num_partials
                num_partials += tile[COUNT]
                for index in range(tile[FIRST], tile[FIRST] + tile[COUNT]):
                    num_entries[tokens[index]] += 1
    first, next_entry = 0, num_tiles
    for token in range(len(num_entries)):
        next_entry[token] = first
        if num_entries[token]:
            merged[num_merged, 0], merged[num_merged, 1], merged[num_merged, 2] = token, first, num_entries[token]
            num_merged += 1
            first += num_entries[token]
    for tiles in (low, high):
        for tile in tiles:
            if tile[PARTIAL] >= 0:
                for offset in range(tile[COUNT]):
                    token = tokens[tile[FIRST] + offset]
                    partials[next_entry[token]] = tile[PARTIAL] + offset
                    next_entry[token] += 1
    return num_merged, num_partials
