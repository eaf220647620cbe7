"""Attention over a paged cache, cut into tiles that a GPU computes at once: who reads which keys, and what is merged.

A *segment* is a set of queries that all read the same stretch of one row's keys: the one new token of a sequence, a
chunk of a prompt, a tree of guesses, or the queries of many sequences that share a prefix. Segments are cut twice. In
queries, into tiles as high as the matrix units like them: a tile is ``queries * heads_per_kv`` rows, since the heads
that share a key-value head read the same keys. And in keys, into chunks of about equal length, as many as keep the GPU
busy (Dao et al. 2023, "Flash-Decoding"): a chunk has ``_LEAST`` keys or more, so that a short context is never cut.

A token whose keys were read by one tile gets its result from there. Any other token's tiles leave *partial* results,
which are merged by their log-sum-exps.

All of this is arithmetic on small integer arrays, done once a step; everything is sent to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

NO_TREE = 1 << 30
"""Where the tree of a segment begins that has none: behind all keys."""
LOW = 16
"""Rows of a low tile: the least that the matrix units take."""
_LEAST = 256
"""Keys in a chunk, at least. Fewer are read faster than the merge of their results is started."""
_ALIGNED = 64
"""Chunks begin at multiples of so many keys."""

ROW, FIRST, COUNT, BEGIN, END, FREE, TREE, START, PARTIAL = range(9)
FIELDS = 9
"""Of a tile: row of the page table; its first entry in ``tokens`` and how many; its first key and the one behind its
last; the first key that some of its queries may not see; the first key of the tree; the flat token of that key; the
index of its first partial result, or -1."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Queries and the keys that they read. The queries of a segment see its keys up to their own positions."""

    rows: Ints
    """``[segments]`` rows of the page table."""
    counts: Ints
    """``[segments]`` queries of each."""
    tokens: Ints
    """``[sum of counts]`` their flat tokens, one segment after the other."""
    begins: Ints
    ends: Ints
    """``[segments]`` the stretch of keys."""
    trees: Ints
    """``[segments]`` the key that is the first token of the segment's tree, or ``NO_TREE``. From there on a query sees
    what its mask says."""
    starts: Ints
    """``[segments]`` the flat token whose key that is; anything where there is no tree."""


def shared_keys(row: int, tokens: Ints, begin: int, end: int) -> Segments:
    """Of a stretch of a row's keys that lies before all of the tokens."""
    one = np.ones(1, np.int64)
    return Segments(row * one, len(tokens) * one, tokens, begin * one, end * one, NO_TREE * one, 0 * one)


def joined(segments: Sequence[Segments]) -> Segments:
    """All segments as one object."""
    names = [field.name for field in fields(Segments)]
    return Segments(*(np.concatenate([getattr(part, name) for part in segments]) for name in names))


@dataclass(frozen=True, slots=True)
class Work:
    """One step's tiles, on the device. All int32 but for ``slots``."""

    pages: Tensor
    """``[rows, width]`` pages of each row."""
    positions: Tensor
    """``[flat tokens]`` position of each in its sequence."""
    slots: Tensor
    """``[flat tokens]`` int64, page * page_size + offset: where each token's own keys and values go. Padding has -1."""
    tokens: Tensor
    """``[entries]`` flat tokens of the tiles' queries."""
    low: Tensor
    """``[tiles, FIELDS]`` tiles of at most ``LOW`` rows; those with a count of 0 are no work."""
    high: Tensor
    """``[tiles, FIELDS]`` tiles of at most ``height`` rows."""
    height: int
    merged: Tensor
    """``[merges, 3]`` a flat token, its first entry in ``partials`` and how many; with 0 there is nothing to merge."""
    partials: Tensor
    """Indices of partial results, those of one token together."""
    partial_count: int
    """How many partial results there are at most."""
    sees: Tensor | None
    """``[flat tokens, words]``: bit ``i % 32`` of word ``i // 32`` says whether a token of a tree sees its ``i``-th
    token. ``None`` when the step has no tree."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's tiles, on the host."""

    arrays: dict[str, npt.NDArray[np.signedinteger[Any]]]
    """The tensors of a ``Work`` by name."""
    height: int


def plan_work(
    segments: Segments,
    pages: Ints,
    positions: Ints,
    slots: Ints,
    *,
    heads_per_kv: int,
    kv_heads: int,
    head_dim: int,
    programs: int,
    window: int | None = None,
    sees: npt.NDArray[np.int32] | None = None,
) -> Plan:
    """The tiles of some segments.

    ``pages``: ``[rows, width]``. ``positions`` and ``slots``: ``[flat tokens]``. ``sees``: as in ``Work``, if there are
    trees.
    ``programs``: how many tiles times key-value heads keep the device busy. With ``window`` a query sees so many of the
    latest keys alone, its own included, and tiles begin at the first key that one of their queries sees.
    """
    low_height = max(LOW, 1 << (heads_per_kv - 1).bit_length())
    is_low = (segments.counts * heads_per_kv <= low_height) & (segments.trees == NO_TREE)
    height = tile_height(int(segments.counts[~is_low].max(initial=0)) * heads_per_kv, heads_per_kv, head_dim)
    per_tile = np.where(is_low, low_height, height) // heads_per_kv
    tiles, owner = _in_queries(segments, per_tile)
    _bound(tiles, segments, positions, window)
    parts, low = [], is_low[owner]
    for kind in (low, ~low):
        parts.append(_in_keys(tiles[kind], max(1, programs // kv_heads)))
    every = np.concatenate(parts)
    merged, partials = _merges(every, segments.tokens)
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
    return Plan({name: array.astype(np.int32) for name, array in arrays.items()} | {"slots": slots}, height)


def busy_programs(device: torch.device) -> int:
    """How many programs keep a GPU busy: two for each of its multiprocessors, so that one waits for its keys while the
    other computes. Elsewhere a few, so that tests see keys cut."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def tile_height(rows: int, heads_per_kv: int, head_dim: int) -> int:
    """Rows of a high tile: 64 is one product of a group of four warps; 128 reads keys for twice as many queries, if
    the registers hold as many results."""
    height = 64 if rows <= 64 or head_dim > 128 else 128
    return max(height, 1 << (heads_per_kv - 1).bit_length())


def packed_bits(sees: npt.NDArray[np.bool_], words: int) -> npt.NDArray[np.int32]:
    """``[rows, columns]`` as ``[rows, words]``, 32 columns in a word, the first in the lowest bit."""
    padded = np.zeros((len(sees), words * 32), np.bool_)
    padded[:, : sees.shape[1]] = sees
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)


def _in_queries(segments: Segments, per_tile: Ints) -> tuple[Ints, Ints]:
    """Tiles of whole segments' keys, ``[tiles, FIELDS]``, and the segment of each."""
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


def _bound(tiles: Ints, segments: Segments, positions: Ints, window: int | None) -> None:
    """Leaves the tiles' queries the keys that some of them see, and notes up to where all of them see all."""
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


def _in_keys(tiles: Ints, wanted: int) -> Ints:
    """Tiles cut so that about ``wanted`` of them have equally many keys."""
    if not len(tiles):
        return tiles
    lengths = tiles[:, END] - tiles[:, BEGIN]
    chunk = max(_LEAST, -(-int(lengths.sum()) // wanted))
    share = -(-lengths // np.maximum(1, -(-lengths // chunk)))
    share = np.maximum(1, -(-share // _ALIGNED)) * _ALIGNED
    counts = np.maximum(1, -(-lengths // share))
    cut = np.repeat(tiles, counts, axis=0)
    offset = np.arange(len(cut)) - np.repeat(np.cumsum(counts) - counts, counts)
    share = np.repeat(share, counts)
    cut[:, BEGIN] += offset * share
    cut[:, END] = np.minimum(cut[:, END], cut[:, BEGIN] + share)
    cut[:, FREE] = np.clip(cut[:, FREE], cut[:, BEGIN], cut[:, END])
    return cut


def _merges(tiles: Ints, tokens: Ints) -> tuple[Ints, Ints]:
    """What is merged for whom; numbers the partial results of the tiles. ``[merges, 3]`` and the partials' indices."""
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


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a step's tensors. Steps of one shape launch the same kernels on tensors at the same addresses, if
    they share their ``Buffers``: a CUDA graph of the one computes the other."""

    rows: int
    width: int
    queries: int
    """Flat tokens."""
    entries: int
    low: int
    high: int
    height: int
    merges: int
    partials: int
    words: int
    """Of each token's tree mask; 0: no token is in a tree."""

    @classmethod
    def of(cls, plan: Plan, *, rounded: bool) -> Shape:
        """With ``rounded`` all sizes are powers of two, so that few shapes serve many steps."""

        def size(count: int) -> int:
            return 1 << (count - 1).bit_length() if rounded and count else count

        arrays = plan.arrays
        rows, width = arrays["pages"].shape
        return cls(
            rows=size(rows),
            width=size(width),
            queries=size(len(arrays["positions"])),
            entries=size(len(arrays["tokens"])),
            low=size(len(arrays["low"])),
            high=size(len(arrays["high"])),
            height=plan.height,
            merges=size(len(arrays["merged"])),
            partials=size(len(arrays["partials"])),
            words=arrays["sees"].shape[1] if "sees" in arrays else 0,
        )


class Buffers:
    """The tensors of steps of one shape, filled anew for each."""

    def __init__(self, shape: Shape, device: torch.device | str) -> None:
        sizes = {
            "pages": (shape.rows, shape.width),
            "positions": (shape.queries,),
            "slots": (2 * shape.queries,),
            "tokens": (shape.entries,),
            "low": (shape.low, FIELDS),
            "high": (shape.high, FIELDS),
            "merged": (shape.merges, 3),
            "partials": (shape.partials,),
            "sees": (shape.queries, shape.words),
        }
        # Each array begins at a multiple of 16 bytes: the kernels are then compiled once for all of them.
        spans = {name: -(-int(np.prod(size)) // 4) * 4 for name, size in sizes.items()}
        cuda = torch.device(device).type == "cuda"
        self._host = torch.zeros(sum(spans.values()), dtype=torch.int32, pin_memory=cuda)
        self._device = torch.empty(len(self._host), dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        views: list[dict[str, Tensor]] = []
        for buffer in (self._host, self._device):
            parts = torch.split(buffer, list(spans.values()))
            views.append(
                {
                    name: part[: int(np.prod(size))].view(size)
                    for (name, size), part in zip(sizes.items(), parts, strict=True)
                }
            )
        for part in views:
            part["slots"] = part["slots"].view(torch.int64)
        self._staged = {name: view.numpy() for name, view in views[0].items()}
        tensors = dict(views[1])
        sees = tensors.pop("sees")
        self.work = Work(
            **tensors, height=shape.height, partial_count=shape.partials, sees=sees if shape.words else None
        )

    def fill(self, plan: Plan) -> Work:
        """Sends a step's arrays to the device, without waiting for it."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copy from here; the step that needed it is long over
        for name, array in plan.arrays.items():
            staged = self._staged[name]
            staged[tuple(slice(0, size) for size in array.shape)] = array
            if name in ("low", "high", "merged"):
                staged[len(array) :] = 0
            elif name == "slots":
                staged[len(array) :] = -1  # padding, of which nothing is kept
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return self.work
