"""Attention over a paged cache on a GPU, cut into tiles that are computed in parallel.

A *segment* is a set of queries that all read the same range of one row's keys: the new token of a sequence, a chunk of
a prompt, a tree of draft tokens, or the queries of many sequences that share a prefix. Segments are cut by queries,
into tiles of a height that suits the matrix units: a tile has ``queries * heads_per_kv`` rows, since the heads that
share a key-value head read the same keys. And they are cut by keys, into chunks of about equal length, as many as keep
the GPU busy (Dao et al. 2023, "Flash-Decoding"): a chunk has ``MIN_KEYS`` keys or more, so that a short context is
never cut.

A token whose keys are read by one tile gets its result from it. Otherwise the token's tiles write *partial* results,
which are merged by their log-sum-exps.

A *batch-invariant* plan depends, for each query, on its own position alone: all tiles have one height, and keys are cut
at multiples of a length that the position decides (``fixed_chunk``), so that the query's sums are made in one order
whatever else is in the step. A tile's further keys, which a query does not see, change none of its bits.

All of this is arithmetic on small integer arrays, done once a step; the arrays are sent to the device in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

NO_TREE = 1 << 30
"""First key of the tree of a segment without a tree: after all keys."""
LOW = 16
"""Rows of a low tile: the fewest that the matrix units take."""
MIN_KEYS = 256
"""Keys of a chunk. Fewer are read faster than the merge of their results is launched."""
KEY_ALIGNMENT = 64
"""Chunks begin at multiples of this."""
MAX_FIXED_CHUNKS = 16
"""Chunks of the keys of one query in a batch-invariant plan."""

ROW, FIRST, COUNT, BEGIN, END, FREE, TREE, START, PARTIAL = range(9)
FIELDS = 9
"""Columns of a tile: its row of the page table; its first entry in ``tokens`` and the number of entries; its first key
and the end of its keys; the first key that some of its queries may not see; the first key of the tree; the flat token
of that key; and the index of its first partial result, or -1."""


class Segments(NamedTuple):
    """Queries and the keys that they read. A query sees the keys of its segment up to its own position."""

    rows: Ints
    """``[segments]`` rows of the page table."""
    counts: Ints
    """``[segments]`` numbers of queries."""
    tokens: Ints
    """``[sum of counts]`` flat tokens of the queries, one segment after the other."""
    begins: Ints
    ends: Ints
    """``[segments]`` the range of keys."""
    trees: Ints
    """``[segments]`` the first key of the segment's tree, or ``NO_TREE``. Its keys are seen by the queries' masks."""
    starts: Ints
    """``[segments]`` the flat token of that key; undefined without a tree."""


def shared_prefix_segment(row: int, tokens: Ints, begin: int, end: int) -> Segments:
    """Return the segment of a range of a row's keys that precede all of the tokens."""
    rows, counts, begins, ends, trees, starts = np.array([row, len(tokens), begin, end, NO_TREE, 0])[:, None]
    return Segments(rows, counts, tokens, begins, ends, trees, starts)


def concat_segments(segments: Sequence[Segments]) -> Segments:
    """Concatenate segments."""
    return Segments(*map(np.concatenate, zip(*segments, strict=True)))


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """The tiles of one step, on the device. All tensors are int32 except ``slots``."""

    pages: Tensor
    """``[rows, width]`` page table."""
    positions: Tensor
    """``[flat tokens]`` positions in the sequences."""
    slots: Tensor
    """``[flat tokens]`` int64, ``page * page_size + offset``: slots of the tokens' keys and values; -1 is padding."""
    tokens: Tensor
    """``[entries]`` flat tokens of the tiles' queries."""
    low: Tensor
    """``[tiles, FIELDS]`` tiles of at most ``LOW`` rows; those with a count of 0 are padding."""
    high: Tensor
    """``[tiles, FIELDS]`` tiles of at most ``height`` rows."""
    height: int
    merged: Tensor
    """``[merges, 3]`` flat token, its first entry in ``partials``, and their number; 0 is padding."""
    partials: Tensor
    """Indices of partial results, grouped by token; there are at most as many results."""
    sees: Tensor | None = None
    """``[flat tokens, words]``: bit ``i % 32`` of word ``i // 32`` is 1 if a token of a tree sees the tree's ``i``-th
    token. ``None`` if the step has no tree."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiles of one step, on the host."""

    arrays: dict[str, npt.NDArray[np.signedinteger[Any]]]
    """The tensors of an ``AttentionTiles`` by name."""
    height: int


def plan_tiles(
    segments: Segments,
    pages: Ints,
    positions: Ints,
    slots: Ints,
    *,
    heads_per_kv: int,
    kv_heads: int,
    head_dim: int,
    programs: int,
    is_float32: bool = False,
    window: int | None = None,
    sees: npt.NDArray[np.int32] | None = None,
    is_batch_invariant: bool = False,
) -> TilePlan:
    """Cut segments into tiles.

    ``pages``: ``[rows, width]``. ``positions`` and ``slots``: ``[flat tokens]``. ``sees``: as in ``AttentionTiles``, if
    there are trees. ``programs``: the number of tiles times key-value heads that keeps the device busy. ``is_float32``:
    products are computed in float32, without the matrix units. With ``window`` a query sees only that many of the
    latest keys, its own included, and tiles begin at the first key that one of their queries sees.
    ``is_batch_invariant``: segments have no trees then, and share no prefix.
    """
    if is_batch_invariant:
        segments = _split_by_chunk(segments, positions)
    low_height = max(LOW, 1 << (heads_per_kv - 1).bit_length())
    is_low = (segments.counts * heads_per_kv <= low_height) & (segments.trees == NO_TREE) & (not is_batch_invariant)
    num_tall = 0 if is_batch_invariant else int(segments.counts[~is_low].max(initial=0)) * heads_per_kv
    height = tile_height(num_tall, heads_per_kv, head_dim, is_float32=is_float32)
    per_tile = np.where(is_low, low_height, height) // heads_per_kv
    tiles, owner = _cut_by_queries(segments, per_tile)
    _drop_unseen_keys(tiles, segments, positions, window)
    parts, low = [], is_low[owner]
    for kind in (low, ~low):
        num_tiles = max(1, programs // kv_heads)
        parts.append(_cut_at_fixed_keys(tiles[kind]) if is_batch_invariant else _cut_by_keys(tiles[kind], num_tiles))
    every = np.concatenate(parts)
    merged, partials = _number_partials(every, segments.tokens)
    arrays: dict[str, npt.NDArray[np.signedinteger[Any]]] = {
        "pages": pages,
        "positions": positions,
        "tokens": segments.tokens,
        "low": every[: len(parts[0])],
        "high": every[len(parts[0]) :],
        "merged": merged,
        "partials": partials,
    }
    if sees is not None:
        arrays["sees"] = sees
    return TilePlan({name: array.astype(np.int32) for name, array in arrays.items()} | {"slots": slots}, height)


def count_busy_programs(device: torch.device) -> int:
    """Return the number of programs that keep a GPU busy: two for each multiprocessor, one of which waits for keys.

    On another device a few, so that tests cut keys too.
    """
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def tile_height(rows: int, heads_per_kv: int, head_dim: int, *, is_float32: bool = False) -> int:
    """Return the rows of a high tile: 64, one product of four warps, or 128, to read keys for twice as many queries.

    128 if there are enough rows and the registers hold their results. In float32, where the operands of a product are
    in registers too, 64, or 32 with long heads; so are those of quantized latents.
    """
    height = 64 if rows <= 64 or head_dim > 128 else 128
    if is_float32:
        height = 64 if head_dim <= 128 else 32
    return max(height, 1 << (heads_per_kv - 1).bit_length())


def pack_bits(sees: npt.NDArray[np.bool_], words: int) -> npt.NDArray[np.int32]:
    """Pack ``[rows, columns]`` into ``[rows, words]``, 32 columns in a word, the first in the lowest bit."""
    padded = np.zeros((len(sees), words * 32), np.bool_)
    padded[:, : sees.shape[1]] = sees
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)


def _cut_by_queries(segments: Segments, per_tile: Ints) -> tuple[Ints, Ints]:
    """Cut segments by queries; return ``[tiles, FIELDS]`` and the segment of each tile."""
    counts = -(-segments.counts // per_tile)
    owner = np.repeat(np.arange(len(counts)), counts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * per_tile[owner]
    first = (np.cumsum(segments.counts) - segments.counts)[owner] + offset
    tiles = np.full((len(owner), FIELDS), -1, np.int64)
    tiles[:, ROW], tiles[:, FIRST] = segments.rows[owner], first
    tiles[:, COUNT] = np.minimum(per_tile[owner], segments.counts[owner] - offset)
    tiles[:, BEGIN], tiles[:, END] = segments.begins[owner], segments.ends[owner]
    tiles[:, TREE], tiles[:, START] = segments.trees[owner], segments.starts[owner]
    return tiles, owner


def _drop_unseen_keys(tiles: Ints, segments: Segments, positions: Ints, window: int | None) -> None:
    """Drop the keys that none of a tile's queries sees, and set ``FREE``, up to which all queries see all keys."""
    if not len(tiles):
        return
    own = positions[segments.tokens]
    lowest, highest = (extreme.reduceat(own, tiles[:, FIRST]) for extreme in (np.minimum, np.maximum))
    tree = tiles[:, TREE] != NO_TREE
    tiles[:, END] = np.where(tree, tiles[:, END], np.minimum(tiles[:, END], highest + 1))
    tiles[:, FREE] = np.minimum(tiles[:, END], np.where(tree, tiles[:, TREE], lowest + 1))
    if window is not None:
        tiles[:, BEGIN] = np.maximum(tiles[:, BEGIN], lowest - window + 1)
        tiles[:, FREE] = tiles[:, BEGIN]


def _cut_by_keys(tiles: Ints, num_tiles: int) -> Ints:
    """Cut tiles by keys into about ``num_tiles`` tiles with equally many keys."""
    if not len(tiles):
        return tiles
    lengths = tiles[:, END] - tiles[:, BEGIN]
    chunk = max(MIN_KEYS, -(-int(lengths.sum()) // num_tiles))
    share = -(-lengths // np.maximum(1, -(-lengths // chunk)))
    share = np.maximum(1, -(-share // KEY_ALIGNMENT)) * KEY_ALIGNMENT
    counts = np.maximum(1, -(-lengths // share))
    cut = np.repeat(tiles, counts, axis=0)
    offset = np.arange(len(cut)) - np.repeat(np.cumsum(counts) - counts, counts)
    share = np.repeat(share, counts)
    cut[:, BEGIN] += offset * share
    cut[:, END] = np.minimum(cut[:, END], cut[:, BEGIN] + share)
    cut[:, FREE] = np.clip(cut[:, FREE], cut[:, BEGIN], cut[:, END])
    return cut


def fixed_chunk(num_keys: Ints) -> Ints:
    """Return the keys of a chunk for queries that see that many: a power of two, ``MIN_KEYS`` or more."""
    shares = -(-num_keys // (MAX_FIXED_CHUNKS * MIN_KEYS))
    return MIN_KEYS << np.ceil(np.log2(np.maximum(shares, 1))).astype(np.int64)


def _split_by_chunk(segments: Segments, positions: Ints) -> Segments:
    """Split segments where the next query has chunks of another length."""
    owner = np.repeat(np.arange(len(segments.counts)), segments.counts)
    chunk = fixed_chunk(positions[segments.tokens] + 1)
    is_first = np.append(True, (owner[1:] != owner[:-1]) | (chunk[1:] != chunk[:-1]))
    first = np.flatnonzero(is_first)
    rows, begins, ends, trees, starts = (
        values[owner[first]]
        for values in (segments.rows, segments.begins, segments.ends, segments.trees, segments.starts)
    )
    return Segments(rows, np.diff(first, append=len(owner)), segments.tokens, begins, ends, trees, starts)


def _cut_at_fixed_keys(tiles: Ints) -> Ints:
    """Cut tiles at multiples of their queries' chunks, the first one included, and leave no key without a mask."""
    if not len(tiles):
        return tiles
    chunk = fixed_chunk(tiles[:, END])
    first = tiles[:, BEGIN] // chunk
    counts = -(-tiles[:, END] // chunk) - first
    cut = np.repeat(tiles, counts, axis=0)
    chunk, index = np.repeat(chunk, counts), np.arange(len(cut)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut[:, BEGIN] = (np.repeat(first, counts) + index) * chunk
    cut[:, END] = np.minimum(cut[:, END], cut[:, BEGIN] + chunk)
    # The code for keys without a mask may contract other products and sums.
    cut[:, FREE] = cut[:, BEGIN]
    return cut


def _number_partials(tiles: Ints, tokens: Ints) -> tuple[Ints, Ints]:
    """Number the partial results of the tiles; return the ``merged`` and ``partials`` of ``AttentionTiles``."""
    counts = tiles[:, COUNT]
    owner = np.repeat(np.arange(len(tiles)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    token = tokens[np.repeat(tiles[:, FIRST], counts) + within]
    partial = np.logical_or.reduceat(np.bincount(token)[token] > 1, np.cumsum(counts) - counts)
    begins = np.cumsum(counts * partial) - counts * partial
    tiles[:, PARTIAL] = np.where(partial, begins, -1)
    left = partial[owner]
    token, index = token[left], (begins[owner] + within)[left]
    order = np.argsort(token, kind="stable")
    owners, first, times = np.unique(token[order], return_index=True, return_counts=True)
    return np.stack((owners, first, times), axis=1), index[order]


class TileShape(NamedTuple):
    """The sizes of a step's arrays.

    Steps of one shape that share their ``TileBuffers`` launch the same kernels on the same addresses, so the CUDA graph
    of one computes the other.
    """

    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each array of a ``TilePlan``."""
    height: int

    @classmethod
    def of(cls, plan: TilePlan, *, rounded: bool) -> TileShape:
        """Return the sizes of a plan; ``rounded``: up to powers of two, so that few shapes serve many steps."""

        def size(count: int) -> int:
            return 1 << (count - 1).bit_length() if rounded and count else count

        shapes = []
        for name, array in plan.arrays.items():
            num_variable = 2 if name == "pages" else 1
            shapes.append((name, (*map(size, array.shape[:num_variable]), *array.shape[num_variable:])))
        return cls(tuple(shapes), plan.height)


class TileBuffers:
    """The tensors of all steps of one shape, filled for each step."""

    def __init__(self, shape: TileShape, device: torch.device | str) -> None:
        # Each array is aligned to 16 bytes: kernels are then compiled once for all of them. Slots take two words each.
        spans = [-(-math.prod(size) * (2 if name == "slots" else 1) // 4) * 4 for name, size in shape.arrays]
        cuda = torch.device(device).type == "cuda"
        self._host = torch.zeros(sum(spans), dtype=torch.int32, pin_memory=cuda)
        self._device = torch.empty(len(self._host), dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

        def split(buffer: Tensor) -> dict[str, Tensor]:
            views = {}
            for (name, size), part in zip(shape.arrays, torch.split(buffer, spans), strict=True):
                words = part.view(torch.int64) if name == "slots" else part
                views[name] = words[: math.prod(size)].view(size)
            return views

        self._staged = {name: view.numpy() for name, view in split(self._host).items()}
        self.work = AttentionTiles(**split(self._device), height=shape.height)

    def fill(self, plan: TilePlan) -> AttentionTiles:
        """Send a step's arrays to the device, without waiting for it."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copy from the host buffer, whose step is long over
        for name, array in plan.arrays.items():
            staged = self._staged[name]
            staged[tuple(slice(0, size) for size in array.shape)] = array
            if name in ("low", "high", "merged"):
                staged[len(array) :] = 0
            elif name == "slots":
                staged[len(array) :] = -1  # padding, which is not stored
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return self.work
